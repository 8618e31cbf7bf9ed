-- KEYS: heartbeat, drain.
--
-- Whoever finds another instance in the key lets it stand: so of two processes of one name only one goes on.
local instance, ttl = unpack(ARGV)
local function read(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and value or ''  -- what is no string is none of ours
end
local holder = read(KEYS[1])
if holder ~= '' and holder ~= instance then
  local time = redis.call('TIME')
  return {holder, redis.call('PEXPIRETIME', KEYS[1]), time[1] * 1000 + math.floor(time[2] / 1000)}
end
redis.call('SET', KEYS[1], instance, 'PX', ttl)
return {read(KEYS[2])}
