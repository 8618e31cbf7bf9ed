-- KEYS: unsettled. ARGV: ms from now, tabs.
local at = clock() + ARGV[1]
for place = 2, #ARGV do redis.call('ZADD', KEYS[1], at, ARGV[place]) end
redis.call('EXPIRE', KEYS[1], 604800)
