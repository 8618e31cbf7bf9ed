-- KEYS: readers, swept. ARGV: how many at most; milliseconds: what `swept` lives, for how long nobody else gets these.
-- Answers the members whose deadline is over. Where nobody has looked for longer than `swept` lives, nobody could say
-- either that he reads: then all deadlines begin anew.
--
-- `swept` holds when somebody looked last. Where that is to come, the clock was set back, and deadlines from before are too
-- late by as much; none is brought so far forward that who still reads could not put it off.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local patience, lease = tonumber(ARGV[2]), tonumber(ARGV[3])
local swept = redis.call('GET', KEYS[2])
redis.call('SET', KEYS[2], string.format('%d', now), 'PX', patience)
local back = (tonumber(swept or 0) or 0) - now
if back > 0 then
  local late = redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%d', now + back), '+inf', 'WITHSCORES')
  for at = 1, #late, 2 do
    redis.call('ZADD', KEYS[1], string.format('%d', math.max(late[at + 1] - back, now + patience)), late[at])
  end
end
if swept then
  local overdue = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
  for _, member in ipairs(overdue) do redis.call('ZADD', KEYS[1], now + lease, member) end
  return overdue
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now + patience)) do
  redis.call('ZADD', KEYS[1], now + patience, member)
end
return {}
