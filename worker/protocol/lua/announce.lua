-- After clock.lua and members.lua. KEYS: queues.
local queue, ttl = unpack(ARGV)
if ttl ~= '0' then
  enter(KEYS[1], queue, ttl)
else
  redis.pcall('ZREM', KEYS[1], queue)
end
return 1
