-- KEYS: readers, swept. ARGV: how many at most; milliseconds: what `swept` lives, for how long nobody else gets these.
-- Answers the members whose deadline is over. Where nobody has looked for longer than `swept` lives, nobody could say
-- either that he reads: then all deadlines begin anew.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local patience, lease = tonumber(ARGV[2]), tonumber(ARGV[3])
local was_swept = redis.call('EXISTS', KEYS[2]) == 1
redis.call('SET', KEYS[2], '1', 'PX', patience)
if was_swept then
  local overdue = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
  for _, member in ipairs(overdue) do redis.call('ZADD', KEYS[1], now + lease, member) end
  return overdue
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now + patience)) do
  redis.call('ZADD', KEYS[1], now + patience, member)
end
return {}
