-- KEYS: leases, holders. ARGV: what a lease lives in ms, how many batches to take at most.
-- Answers pairs: a batch that nobody runs, and the fencing token of who takes it now.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local claimed = {}
for _, batch in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local token = redis.call('HINCRBY', KEYS[2], 'last', 1)
  redis.call('ZADD', KEYS[1], now + ARGV[1], batch)
  redis.call('HSET', KEYS[2], batch, token)
  claimed[#claimed + 1] = batch
  claimed[#claimed + 1] = token
end
return claimed
