-- KEYS: requests (a window), running, background. ARGV: id of the lease, requests per minute (0: any), requests at once (0:
-- any), what the lease lives in ms, for how long a lapsed one is kept.
-- Answers what is in the way (0: nothing, 1: those of this minute, 2: those that run), how many there are of that, ms until
-- it is worth another try; how many count in this minute, ms until none of them does.
local now = clock()
local sum, seconds = window(KEYS[1], now)
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {0, 0, 0, sum, until_empty(seconds)} end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[5])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%d', now + ARGV[4]), '+inf')) do
  redis.call('ZADD', KEYS[2], now + ARGV[4], lease)  -- from before the clock was set back: all leases live equally long
end
local per_minute, at_once = tonumber(ARGV[2]), tonumber(ARGV[3])
if per_minute > 0 and sum >= per_minute then
  return {1, sum, until_free(seconds, sum - per_minute + 1), sum, until_empty(seconds)}
end
if at_once > 0 then
  local running = redis.call('ZCOUNT', KEYS[2], now, '+inf') + redis.call('ZCARD', KEYS[3])
  if running >= at_once then return {2, running, 1000, sum, until_empty(seconds)} end
end
redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
count_in(KEYS[1], math.floor(now / 1000), 1)
return {0, 0, 0, sum + 1, 61000}
