-- A key that was set with a time to live may say in its value, behind the last slash, how long that was (ms). It outlives that
-- where the server's clock was set back: whoever looks at such a key cuts it to that.
local function cut(key, value, now)
  local ttl = tonumber(string.match(value, '/(%d+)$'))
  if ttl and redis.call('PEXPIRETIME', key) > now + ttl then redis.call('PEXPIRE', key, ttl) end
end
