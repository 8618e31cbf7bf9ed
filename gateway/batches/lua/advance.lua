-- KEYS: progress. ARGV: token, the expected status, the new one (the same: only the fields change), fields and values.
-- Returns the status afterwards, which differs if somebody has cancelled the batch; nothing if a later token holds it, or the
-- batch has expired.
-- Loaded after fence.lua.
if not is_holder(KEYS[1], ARGV[1]) then return false end
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= ARGV[2] then return status end
for at = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
redis.call('HSET', KEYS[1], 'status', ARGV[3])
redis.call('HSETNX', KEYS[1], ARGV[3] .. '_at', redis.call('TIME')[1])
return ARGV[3]
