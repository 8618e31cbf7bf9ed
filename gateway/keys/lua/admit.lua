-- KEYS: requests (a window), running, open. ARGV: id of the lease, requests per minute (0: any), concurrent
-- requests (0: any), length of the lease in ms, how long a lapsed one is kept, how many seconds a tab is open at most, the id
-- of the request that is joined if it runs. A joining request does not count as concurrent: its lease has already lapsed.
-- Returns the limit reached (0: none, 1: requests in this minute, 2: concurrent ones), how many there are of that, ms until a
-- retry makes sense; how many count in this minute, ms until none of them does; whether one is joined.
-- Loaded after shared/clock.lua, window.lua and open.lua.
local now = clock()
local sum, seconds = window(KEYS[1], now)
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {0, 0, 0, sum, until_empty(seconds), 0} end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[5])
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%d', now + ARGV[4]), '+inf')) do
  redis.call('ZADD', KEYS[2], now + ARGV[4], lease)  -- from before the clock was set back: all leases are equally long
end
local per_minute, at_once, joins = tonumber(ARGV[2]), tonumber(ARGV[3]), false
if per_minute > 0 and sum >= per_minute then
  return {1, sum, until_free(seconds, sum - per_minute + 1), sum, until_empty(seconds), 0}
end
if at_once > 0 then
  local running, is_open = open_tabs(KEYS[3], now, ARGV[6], ARGV[7])
  running, joins = running + redis.call('ZCOUNT', KEYS[2], now, '+inf'), is_open
  if not joins and running >= at_once then return {2, running, 1000, sum, until_empty(seconds), 0} end
end
redis.call('ZADD', KEYS[2], joins and now - 1 or now + ARGV[4], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
count_in(KEYS[1], math.floor(now / 1000), 1)
return {0, 0, 0, sum + 1, 61000, joins and 1 or 0}
