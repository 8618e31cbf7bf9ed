-- KEYS: readers, swept. ARGV: how many at most; milliseconds: time to live of `swept`, lease on the members returned.
-- Returns the members whose deadline has passed. If nobody has looked for longer than the life of `swept`, readers could not
-- report either: then all deadlines are extended.
--
-- `swept` holds the time of the last look. If that is in the future, the clock was set back, and earlier deadlines are too
-- late by the difference. They are moved forward, but not so far that a reader could no longer extend them.
-- Loaded after shared/clock.lua.
local now = clock()
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
