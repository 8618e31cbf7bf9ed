-- KEYS: records, revocations, notices. ARGV: id of a key, how many notices are kept.
-- Returns whether there is such a key that was not revoked before.
-- Loaded after shared/clock.lua.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if redis.call('HSETNX', KEYS[2], ARGV[1], clock()) == 0 then return 0 end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[2], '*', 'key', ARGV[1])
return 1
