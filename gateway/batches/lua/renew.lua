-- KEYS: leases, holders. ARGV: batch, token, length of a lease in ms.
-- Returns whether the lease is still its holder's.
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
return 1
