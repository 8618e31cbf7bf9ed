-- KEYS: running. ARGV: length of a lease in ms, how long lapsed ones are kept, ids of leases. A lease that has ended stays so.
-- Loaded after shared/clock.lua.
local deadline = clock() + ARGV[1]
for at = 3, #ARGV do redis.call('ZADD', KEYS[1], 'XX', deadline, ARGV[at]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
