-- Reserves a name for a process that starts, or renews that. A name belongs to one process: either to one that serves, which has
-- a heartbeat, or to one that starts.
--
-- KEYS: heartbeat, starting.
-- ARGV: instance; time to live (ms).
-- Answers '' if the name is reserved; otherwise the instance that has it, when its key expires, and the time.
-- Loaded after shared/clock.lua, presence/cut.lua and shared/junk.lua.
local instance, ttl = unpack(ARGV)
for _, key in ipairs(KEYS) do
  local holder = redis.call('GET', key) or ''
  if holder ~= '' and holder ~= instance then
    cut(key, holder, clock())
    local until_ms = redis.call('PEXPIRETIME', key)
    if until_ms ~= -1 then return {holder, until_ms, clock()} end
    junk(key)  -- a key that holds a name always expires
  end
end
redis.call('SET', KEYS[2], instance, 'PX', ttl)
return {''}
