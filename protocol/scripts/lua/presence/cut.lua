-- Cuts a key to the time to live (ms) that its value may state after the last slash. A key outlives that if the server's clock
-- was set back, so every script that reads such a key cuts it.
local function cut(key, value, now)
  local ttl = tonumber(string.match(value, '/(%d+)$'))
  if ttl and redis.call('PEXPIRETIME', key) > now + ttl then redis.call('PEXPIRE', key, ttl) end
end
