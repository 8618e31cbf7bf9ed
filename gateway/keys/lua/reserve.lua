-- After open.lua. KEYS: tokens (a window), charges, running, open. ARGV: tokens per minute (0: any), requests at once (0: any), id
-- of the lease that the tabs are opened under, for how many seconds a tab is open at most; of each tab its name, how much it
-- takes of the requests at once, its tokens ('-': none are counted).
-- Opens all of them or none. Answers what is in the way (0: nothing, 1: the tokens of this minute, 2: what runs), how many there
-- are of that, how many more are asked for, ms until it is worth another try; how many tokens count in this minute, ms until none
-- of them does. What is open or paid for is not opened again.
local now = clock()
local second, per_minute, limit = math.floor(now / 1000), tonumber(ARGV[1]), tonumber(ARGV[2])
local sum, seconds = window(KEYS[1], now)
local new, at_once, tokens = {}, 0, 0
for at = 5, #ARGV, 3 do
  local id = string.match(ARGV[at], ' (.*)$')
  local is_known = redis.call('HEXISTS', KEYS[4], ARGV[at]) == 1 or redis.call('ZSCORE', KEYS[2], 'paid:' .. id)
    or redis.call('ZSCORE', KEYS[2], id)  -- by a gateway from before tabs
  if not is_known then
    new[#new + 1] = at
    at_once, tokens = at_once + ARGV[at + 1], tokens + (tonumber(ARGV[at + 2]) or 0)
  end
end
if #new == 0 then return {0, 0, 0, 0, sum, until_empty(seconds)} end
if per_minute > 0 then
  tokens = math.min(tokens, per_minute)  -- more than the limit needs a minute without anything else
  if sum + tokens > per_minute then
    return {1, sum, tokens, until_free(seconds, sum + tokens - per_minute), sum, until_empty(seconds)}
  end
end
if limit > 0 and at_once > 0 then
  local lapses = tonumber(redis.call('ZSCORE', KEYS[3], ARGV[3]) or 0)
  local running = redis.call('ZCOUNT', KEYS[3], now, '+inf') - (lapses >= now and 1 or 0) + open_at_once(KEYS[4], now, ARGV[4])
  if running + at_once > limit then return {2, running, at_once, 1000, sum, until_empty(seconds)} end
end
local left = tokens
for _, at in ipairs(new) do
  local own = tonumber(ARGV[at + 2]) and math.min(left, tonumber(ARGV[at + 2]))
  left = left - (own or 0)
  redis.call('HSET', KEYS[4], ARGV[at], string.format('%d %s %d', ARGV[at + 1], own and string.format('%d', own) or '-', second))
end
redis.call('EXPIRE', KEYS[4], ARGV[4])
if at_once > 0 then redis.call('ZREM', KEYS[3], ARGV[3]) end
if tokens > 0 then count_in(KEYS[1], second, tokens) end
return {0, 0, 0, 0, sum + tokens, tokens > 0 and 61000 or until_empty(seconds)}
