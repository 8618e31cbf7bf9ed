-- KEYS: tokens (a window), charges. ARGV: id of the charge, its tokens, tokens per minute, for how long charges are known.
-- Answers whether they were reserved, how many count in this minute, ms until it is worth another try or until none of
-- them counts. What was reserved before, or is paid for, is not reserved again.
local now = clock()
local tokens, limit = tonumber(ARGV[2]), tonumber(ARGV[3])
local sum, seconds = window(KEYS[1], now)
if redis.call('ZSCORE', KEYS[2], ARGV[1]) or redis.call('ZSCORE', KEYS[2], 'paid:' .. ARGV[1]) then
  return {1, sum, until_empty(seconds)}
end
if sum + tokens > limit then return {0, sum, until_free(seconds, sum + tokens - limit)} end
local second = math.floor(now / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', second - ARGV[4])
redis.call('ZADD', KEYS[2], second, ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[4])
count_in(KEYS[1], second, tokens)
return {1, sum + tokens, 61000}
