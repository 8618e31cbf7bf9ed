-- After clock.lua, cut.lua and junk.lua. KEYS: heartbeat, starting.
--
-- A name is one process's, be it one that serves, which has a heartbeat, or one that starts.
local instance, ttl = unpack(ARGV)
for _, key in ipairs(KEYS) do
  local holder = redis.call('GET', key) or ''
  if holder ~= '' and holder ~= instance then
    cut(key, holder, clock())
    local until_ms = redis.call('PEXPIRETIME', key)
    if until_ms ~= -1 then return {holder, until_ms, clock()} end
    junk(key)  -- what holds a name lapses
  end
end
redis.call('SET', KEYS[2], instance, 'PX', ttl)
return {''}
