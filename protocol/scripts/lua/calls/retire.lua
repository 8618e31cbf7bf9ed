-- Frees calls of a dead consumer, and removes the consumer once it has none. It also removes the other keys that say that the
-- consumer serves. They lapse with its heartbeat, and may last longer if the server's clock was set back.
--
-- KEYS: calls, the consumer's heartbeat, digests, room, serving, and the consumer's nudges and report.
-- ARGV: group; consumer; the consumer that gets the calls; how many calls at most.
-- Answers how many calls it freed, or -1 if the consumer lives.
local group, consumer, unowned, count = unpack(ARGV)
if redis.call('EXISTS', KEYS[2]) == 1 then return -1 end
redis.pcall('ZREM', KEYS[5], consumer)
redis.call('DEL', KEYS[6])
redis.call('DEL', KEYS[7])  -- another selector of users.acl allows this key
local pending = redis.call('XPENDING', KEYS[1], group, '-', '+', count, consumer)
for _, item in ipairs(pending) do
  redis.call('XCLAIM', KEYS[1], group, unowned, 0, item[1], 'JUSTID')
end
if #redis.call('XPENDING', KEYS[1], group, '-', '+', 1, consumer) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, consumer)
  redis.pcall('HDEL', KEYS[3], consumer)
  redis.pcall('ZREM', KEYS[4], consumer)
end
return #pending
