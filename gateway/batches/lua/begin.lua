-- KEYS: progress. ARGV: time to live in s. Nothing changes if it has begun.
redis.call('HSETNX', KEYS[1], 'status', 'validating')
if redis.call('TTL', KEYS[1]) < 0 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
