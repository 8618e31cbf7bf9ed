-- Finds the heartbeats that are gone.
--
-- KEYS: heartbeats.
-- Answers the places of those that are gone, from 1 on.
-- Loaded after shared/clock.lua and presence/cut.lua.
local gone, now = {}, clock()
for place, value in ipairs(redis.call('MGET', unpack(KEYS))) do
  if value then cut(KEYS[place], value, now) else gone[#gone + 1] = place end
end
return gone
