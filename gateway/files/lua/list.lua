-- KEYS: an owner's list. ARGV: an id, seconds for which anything may be kept at most.
-- The first time counts: a repetition changes nothing.
-- Loaded after shared/clock.lua.
local now = clock()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2] * 1000)
redis.call('ZADD', KEYS[1], 'NX', now, ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
