-- KEYS: readers. ARGV: milliseconds from now, members.
-- Loaded after shared/clock.lua.
local deadline = clock() + ARGV[1]
for at = 2, #ARGV do redis.call('ZADD', KEYS[1], deadline, ARGV[at]) end
redis.call('EXPIRE', KEYS[1], 86400)
