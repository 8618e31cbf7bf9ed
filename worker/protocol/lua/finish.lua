-- ARGV from 6 on, for each entry: n of its id, number of fields and values, fields and values.
local state, reply, cancel = KEYS[1], KEYS[2], KEYS[3]
local epoch, instance, last, status, ttl = unpack(ARGV, 1, 5)
local s = redis.call('HMGET', state, 'epoch', 'instance', 'status')
if s[1] ~= epoch or s[2] ~= instance then return 'fenced' end
if s[3] == 'done' or s[3] == 'dead' then return 'already' end
local newest = redis.call('XREVRANGE', reply, '+', '-', 'COUNT', 1)[1]
if not newest or newest[1] ~= epoch .. '-' .. last then return 'lost' end
local at = 6
while ARGV[at] do  -- one reply entry at a time: unpack takes a few thousand values, and the schema has few fields
  local count = tonumber(ARGV[at + 1])
  redis.call('XADD', reply, epoch .. '-' .. ARGV[at], unpack(ARGV, at + 2, at + 1 + count))
  at = at + 2 + count
end
redis.call('HSET', state, 'status', status)
redis.call('PEXPIRE', state, ttl)
redis.call('PEXPIRE', reply, ttl)
redis.call('DEL', cancel)
return 'ok'
