-- KEYS: tokens (a window), charges, open. ARGV: a tab's name, the tokens that its request has used in all ('':
-- unknown), whether that is final, whether to note that the request is paid for, in case the same tab is opened again, and for
-- how many seconds.
-- An excess is given back to the second it was charged in, if that still counts. Returns whether the tab was open.
-- Loaded after shared/clock.lua, window.lua and open.lua.
local at_once, tokens, second = tab_of(redis.call('HGET', KEYS[3], ARGV[1]))
local now = math.floor(clock() / 1000)
local is_over, total = ARGV[3] == '1', tonumber(ARGV[2])
if is_over then redis.call('HDEL', KEYS[3], ARGV[1]) end
if not at_once then return 0 end
if is_over and ARGV[4] == '1' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[5])
  redis.call('ZADD', KEYS[2], now, 'paid:' .. string.match(ARGV[1], ' (.*)$'))
  redis.call('EXPIRE', KEYS[2], ARGV[5])
end
if not (tokens and total) then return 1 end
if total > tokens then
  count_in(KEYS[1], now, total - tokens)
  if not is_over then redis.call('HSET', KEYS[3], ARGV[1], string.format('%d %d %d', at_once, total, second)) end
elseif is_over and total < tokens and redis.call('HEXISTS', KEYS[1], second) == 1 then
  redis.call('HINCRBY', KEYS[1], second, total - tokens)
end
return 1
