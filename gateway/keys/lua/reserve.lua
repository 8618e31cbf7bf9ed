-- KEYS: tokens (a window), charges, running, open. ARGV: tokens per minute (0: any), concurrent requests (0: any),
-- id of the lease that the tabs replace, how many seconds a tab is open at most; for each tab its name, its number of concurrent
-- requests, the tokens that it needs, and those that it may use ('-': none are counted).
-- Opens all of them or none. Each is charged what it may use, as far as the minute's limit allows. Returns the limit reached
-- (0: none, 1: tokens in this minute, 2: concurrent requests), how many there are of that, how many more are requested, ms until
-- a retry makes sense; how many tokens count in this minute, ms until none of them does; how many were charged to the tabs.
-- A tab that is open or paid for is not opened again.
-- Loaded after shared/clock.lua, window.lua and open.lua.
local now = clock()
local second, per_minute, limit = math.floor(now / 1000), tonumber(ARGV[1]), tonumber(ARGV[2])
local sum, seconds = window(KEYS[1], now)
local new, at_once, least, most = {}, 0, 0, 0
for at = 5, #ARGV, 4 do
  local id = string.match(ARGV[at], ' (.*)$')
  local is_known = redis.call('HEXISTS', KEYS[4], ARGV[at]) == 1 or redis.call('ZSCORE', KEYS[2], 'paid:' .. id)
    or redis.call('ZSCORE', KEYS[2], id)  -- from a gateway version before tabs
  if not is_known then
    new[#new + 1] = at
    at_once, least = at_once + ARGV[at + 1], least + (tonumber(ARGV[at + 2]) or 0)
    most = most + (tonumber(ARGV[at + 3]) or 0)
  end
end
if per_minute > 0 then
  least = math.min(least, per_minute)  -- a request above the limit needs a minute for itself
  local excess = sum + least - per_minute
  if #new > 0 and excess > 0 then
    local _, _, charged = open_tabs(KEYS[4], now, ARGV[4])
    local wait = until_free(seconds, excess)
    if charged >= excess then wait = math.min(wait, 5000) end  -- a tab that ends gives back what it has not used
    return {1, sum, least, wait, sum, until_empty(seconds), 0}
  end
  most = math.min(most, math.max(per_minute - sum, 0))
end
if #new > 0 and limit > 0 and at_once > 0 then
  local lapses = tonumber(redis.call('ZSCORE', KEYS[3], ARGV[3]) or 0)
  local leases = redis.call('ZCOUNT', KEYS[3], now, '+inf') - (lapses >= now and 1 or 0)
  local running = leases + open_tabs(KEYS[4], now, ARGV[4])
  if running + at_once > limit then return {2, running, at_once, 1000, sum, until_empty(seconds), 0} end
end
local left = most
for _, at in ipairs(new) do
  local own = tonumber(ARGV[at + 3]) and math.min(left, tonumber(ARGV[at + 3]))
  left = left - (own or 0)
  redis.call('HSET', KEYS[4], ARGV[at], string.format('%d %s %d', ARGV[at + 1], own and string.format('%d', own) or '-', second))
end
redis.call('EXPIRE', KEYS[4], ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[3])
if most > 0 then count_in(KEYS[1], second, most) end
return {0, 0, 0, 0, sum + most, most > 0 and 61000 or until_empty(seconds), most}
