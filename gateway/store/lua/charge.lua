-- KEYS: sizes, expiries. ARGV: name, its bytes from now on (0: it is gone), time to live in s (0: unchanged), limit on the
-- sum (0: none).
-- Returns whether the bytes are granted, the sum, and the server's clock in ms.
--
-- Expired charges are no longer counted. Without a time to live only an existing charge changes: it may have been removed.
-- Loaded after shared/clock.lua.
local sizes, expiries, name = KEYS[1], KEYS[2], ARGV[1]
local bytes, ttl, limit = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now_ms = clock()
local now = math.floor(now_ms / 1000)
local function remove(member)
  redis.call('HINCRBY', sizes, 'total', -(tonumber(redis.call('HGET', sizes, member)) or 0))
  redis.call('HDEL', sizes, member)
  redis.call('ZREM', expiries, member)
end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', expiries, '-inf', now, 'LIMIT', 0, 64)) do remove(old) end
local had = tonumber(redis.call('HGET', sizes, name))
local total = tonumber(redis.call('HGET', sizes, 'total')) or 0
if bytes == 0 then
  if had then remove(name) end
  return {1, total - (had or 0), now_ms}
end
local more = bytes - (had or 0)
if limit > 0 and more > 0 and total + more > limit then return {0, total, now_ms} end
if ttl == 0 and not had then return {1, total, now_ms} end
redis.call('HSET', sizes, name, bytes)
redis.call('HINCRBY', sizes, 'total', more)
if ttl > 0 then
  redis.call('ZADD', expiries, now + ttl, name)
  for _, key in ipairs(KEYS) do
    if redis.call('TTL', key) < ttl then redis.call('EXPIRE', key, ttl) end
  end
end
return {1, total + more, now_ms}
