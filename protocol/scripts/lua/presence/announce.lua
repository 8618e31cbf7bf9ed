-- Puts a queue on the list of served queues, or takes it off.
--
-- KEYS: queues.
-- ARGV: queue; for how many ms it is listed (0 takes it off).
-- Answers 1.
-- Loaded after shared/clock.lua, shared/junk.lua and presence/members.lua.
local queue, ttl = unpack(ARGV)
if ttl ~= '0' then
  enter(KEYS[1], queue, ttl)
else
  redis.call('ZREM', KEYS[1], queue)
end
return 1
