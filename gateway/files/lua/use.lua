-- KEYS: a file's users. ARGV: a batch, seconds for which it needs the file at most.
-- Loaded after shared/clock.lua.
local now = clock()
redis.call('ZADD', KEYS[1], now + ARGV[2] * 1000, ARGV[1])
if redis.call('TTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
