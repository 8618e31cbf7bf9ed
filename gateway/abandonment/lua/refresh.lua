-- KEYS: readers. ARGV: milliseconds from now, members.
local time = redis.call('TIME')
local deadline = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
for at = 2, #ARGV do redis.call('ZADD', KEYS[1], deadline, ARGV[at]) end
redis.call('EXPIRE', KEYS[1], 86400)
