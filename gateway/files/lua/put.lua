-- KEYS: a body. ARGV: the place of a piece, its bytes, the body's time to live in s.
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
