-- KEYS: leases, holders. ARGV: batch, token, length of a lease in ms.
-- Returns whether the lease is still its holder's.
-- Loaded after shared/clock.lua.
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZADD', KEYS[1], clock() + ARGV[3], ARGV[1])
return 1
