-- KEYS: leases, holders. ARGV: batch, token, whether the batch has ended.
-- A batch that has not ended is free for the next gateway.
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1], ARGV[1] .. '/lease')
if ARGV[3] == '1' then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  redis.call('ZADD', KEYS[1], 0, ARGV[1])
end
return 1
