-- KEYS: fingerprint. ARGV: the digest of the current request, time to live in s.
-- Returns the digest of the first request.
redis.call('SET', KEYS[1], ARGV[1], 'NX')
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('GET', KEYS[1])
