-- KEYS: progress. ARGV: token, the status that it has, the one that it gets (the same: only the fields change), fields and
-- values.
-- Answers the status that there is now, which is another one where somebody has cancelled the batch; nothing where a later
-- token has it, or the batch has expired.
if not is_holder(KEYS[1], ARGV[1]) then return false end
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= ARGV[2] then return status end
for at = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
redis.call('HSET', KEYS[1], 'status', ARGV[3])
redis.call('HSETNX', KEYS[1], ARGV[3] .. '_at', redis.call('TIME')[1])
return ARGV[3]
