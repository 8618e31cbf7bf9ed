-- KEYS: calls, the consumer's heartbeat, digests, room, serving, nudges, report.
--
-- What else says that the consumer serves, and lapses with its heartbeat, may last longer where the server's clock was set back.
local group, consumer, unowned, count = unpack(ARGV)
if redis.call('EXISTS', KEYS[2]) == 1 then return -1 end
redis.pcall('ZREM', KEYS[5], consumer)
redis.call('DEL', KEYS[6])
redis.call('DEL', KEYS[7])  -- of another selector in users.acl
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
