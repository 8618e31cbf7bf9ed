-- After clock.lua and cut.lua. KEYS: heartbeat, starting.
--
-- A name is one process's, be it one that serves, which has a heartbeat, or one that starts.
local instance, ttl = unpack(ARGV)
for _, key in ipairs(KEYS) do
  local holder = redis.pcall('GET', key)
  if type(holder) == 'string' and holder ~= '' and holder ~= instance then
    cut(key, holder)
    return {holder, redis.call('PEXPIRETIME', key), clock()}
  end
end
redis.call('SET', KEYS[2], instance, 'PX', ttl)
return {''}
