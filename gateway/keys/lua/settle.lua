-- KEYS: tokens (a window), charges. ARGV: id of the charge, how many tokens it was short of (below 0: too many), whether
-- others may be about to make the same one.
-- What was too much is given back where it was taken, if that still counts.
local second = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not second then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
if ARGV[3] == '1' then redis.call('ZADD', KEYS[2], second, 'paid:' .. ARGV[1]) end
local short = tonumber(ARGV[2])
if short > 0 then
  count_in(KEYS[1], math.floor(clock() / 1000), short)
elseif redis.call('HEXISTS', KEYS[1], second) == 1 then
  redis.call('HINCRBY', KEYS[1], second, short)
end
return 1
