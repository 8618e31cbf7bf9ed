-- KEYS: running, background. ARGV: id of a lease; what goes on without it, if any, and for how long that counts at most, in
-- ms.
redis.call('ZREM', KEYS[1], ARGV[1])
if ARGV[2] then
  redis.call('ZADD', KEYS[2], clock() + ARGV[3], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
