-- KEYS: heartbeat, drain, serving.
--
-- A key that holds another instance is left alone, so of two processes with one name only one keeps running. The key of
-- those that serve expires with its last member, so it exists as long as one of them lives.
local instance, ttl, worker, is_serving = unpack(ARGV)
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
local serving = KEYS[3]
if is_serving == '1' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local entry = {'ZADD', serving, string.format('%d', now + ttl), worker}
  if type(redis.pcall(unpack(entry))) ~= 'number' then  -- somebody wrote something else here
    redis.call('DEL', serving)
    redis.call(unpack(entry))
  end
  redis.call('ZREMRANGEBYSCORE', serving, '-inf', string.format('%d', now))
  redis.call('PEXPIREAT', serving, redis.call('ZRANGE', serving, -1, -1, 'WITHSCORES')[2])
else
  redis.pcall('ZREM', serving, worker)
end
return {read(KEYS[2])}
