-- After clock.lua and cut.lua. KEYS: heartbeats. Answers the places of those that are gone.
local gone, now = {}, clock()
for place, value in ipairs(redis.call('MGET', unpack(KEYS))) do
  if value then cut(KEYS[place], value, now) else gone[#gone + 1] = place end
end
return gone
