-- KEYS: a body. ARGV: the place of a piece, its bytes, seconds that the body lives from now.
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
