-- KEYS: requests, heartbeat, drain, serving, card, calls, digests, room, nudges.
local group, worker, instance = unpack(ARGV)
if redis.call('GET', KEYS[2]) ~= instance then return 0 end
redis.call('GET', KEYS[3])  -- DEL would remove anything
redis.call('XACK', KEYS[9], group, '0-1')
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('DEL', KEYS[9])  -- of another selector in users.acl, and one has to allow all keys of a command
redis.pcall('ZREM', KEYS[8], worker)
redis.pcall('ZREM', KEYS[4], worker)
redis.pcall('HDEL', KEYS[7], worker)
for _, stream in ipairs({KEYS[1], KEYS[6]}) do
  local pending = redis.pcall('XPENDING', stream, group, '-', '+', 1, worker)
  if not pending.err and #pending == 0 then redis.call('XGROUP', 'DELCONSUMER', stream, group, worker) end
end
if redis.call('EXISTS', KEYS[4]) == 1 then return 1 end
redis.call('HMGET', KEYS[5], 'worker')
redis.call('DEL', KEYS[5])  -- one that still drains writes it again
return 2
