-- Appends the last entries of a reply and closes the request, all or nothing.
--
-- KEYS: state, reply, cancel.
-- ARGV: epoch; instance; the number of the last entry that was written; the final status; time to live (ms); then for each entry
-- its number (n of `<epoch>-<n>`), how many fields and values it has, and these.
-- Answers 'ok'; 'fenced' if the request has another owner; 'already' if it has ended; 'lost' if the reply does not end with this
-- owner's last entry.
local state, reply, cancel = KEYS[1], KEYS[2], KEYS[3]
local epoch, instance, last, status, ttl = unpack(ARGV, 1, 5)
local s = redis.call('HMGET', state, 'epoch', 'instance', 'status')
if s[1] ~= epoch or s[2] ~= instance then return 'fenced' end
if s[3] == 'done' or s[3] == 'dead' then return 'already' end
local newest = redis.call('XREVRANGE', reply, '+', '-', 'COUNT', 1)[1]
if not newest or newest[1] ~= epoch .. '-' .. last then return 'lost' end
local at = 6
while ARGV[at] do  -- one entry at a time: unpack takes a few thousand values, and the schema allows few fields
  local count = tonumber(ARGV[at + 1])
  redis.call('XADD', reply, epoch .. '-' .. ARGV[at], unpack(ARGV, at + 2, at + 1 + count))
  at = at + 2 + count
end
redis.call('HSET', state, 'status', status)
redis.call('PEXPIRE', state, ttl)
redis.call('PEXPIRE', reply, ttl)
redis.call('DEL', cancel)
return 'ok'
