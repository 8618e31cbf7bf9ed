-- KEYS: unsettled. ARGV: how many at most, for how many ms nobody else gets these, how many ms ahead a check is at most.
-- Returns the tabs to check.
-- Loaded after shared/clock.lua.
local now = clock()
local furthest = now + ARGV[3]
for _, tab in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%d', furthest), '+inf', 'LIMIT', 0, ARGV[1])) do
  redis.call('ZADD', KEYS[1], furthest, tab)  -- from before the clock was set back
end
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, tab in ipairs(due) do redis.call('ZADD', KEYS[1], now + ARGV[2], tab) end
return due
