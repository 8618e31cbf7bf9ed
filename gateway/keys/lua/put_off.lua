-- KEYS: unsettled. ARGV: ms from now, how many seconds the set is kept at least, tabs.
-- Loaded after shared/clock.lua.
local at = clock() + ARGV[1]
for place = 3, #ARGV do redis.call('ZADD', KEYS[1], at, ARGV[place]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
