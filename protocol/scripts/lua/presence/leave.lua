-- Removes the heartbeat of a worker that leaves, its drain mark, and its consumers if nothing is pending for them. The queue's
-- card goes with the last worker that serves.
--
-- KEYS: requests, heartbeat, drain, serving, card, calls, digests, room, nudges, alike, lapses.
-- ARGV: group, worker, instance.
-- Answers 0 if another process has the name, 2 if no worker serves the queue now, and otherwise 1.
local group, worker, instance = unpack(ARGV)
if redis.call('GET', KEYS[2]) ~= instance then return 0 end
redis.call('GET', KEYS[3])  -- fails over junk, which DEL would remove
redis.call('XACK', KEYS[9], group, '0-1')
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('DEL', KEYS[9])  -- a command of its own: another selector of users.acl allows it, and one must allow all its keys
redis.pcall('ZREM', KEYS[8], worker)
redis.pcall('ZREM', KEYS[4], worker)
redis.pcall('ZREM', KEYS[10], worker)
redis.pcall('ZREM', KEYS[11], worker)
redis.pcall('HDEL', KEYS[7], worker)
for _, stream in ipairs({KEYS[1], KEYS[6]}) do
  local pending = redis.pcall('XPENDING', stream, group, '-', '+', 1, worker)
  if not pending.err and #pending == 0 then redis.call('XGROUP', 'DELCONSUMER', stream, group, worker) end
end
if redis.call('EXISTS', KEYS[4]) == 1 then return 1 end
redis.call('HMGET', KEYS[5], 'worker')
redis.call('DEL', KEYS[5])  -- a worker that still drains writes it again
return 2
