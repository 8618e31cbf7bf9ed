-- KEYS: fingerprint. ARGV: the digest of what is asked for now, time to live in s.
-- Answers the digest of what was asked for first.
redis.call('SET', KEYS[1], ARGV[1], 'NX')
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('GET', KEYS[1])
