-- After clock.lua, junk.lua and members.lua. KEYS: queues.
local queue, ttl = unpack(ARGV)
if ttl ~= '0' then
  enter(KEYS[1], queue, ttl)
else
  redis.call('ZREM', KEYS[1], queue)
end
return 1
