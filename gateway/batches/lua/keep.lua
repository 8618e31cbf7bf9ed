-- KEYS: progress, output, errors. ARGV: token, place of a line, 1 (completed) or 0 (failed), its result, time to live in s,
-- names of counts and the increment of each.
-- Returns whether the token is still the holder's. Only a line's first result counts. Invalid counts stay as they are.
-- Loaded after fence.lua.
if not is_holder(KEYS[1], ARGV[1]) then return 0 end
if redis.call('HEXISTS', KEYS[2], ARGV[2]) == 1 or redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then return 1 end
local is_good = ARGV[3] == '1'
local body = is_good and KEYS[2] or KEYS[3]
redis.call('HSET', body, ARGV[2], ARGV[4])
redis.call('EXPIRE', body, ARGV[5])
redis.pcall('HINCRBY', KEYS[1], is_good and 'completed' or 'failed', 1)
redis.pcall('HINCRBY', KEYS[1], is_good and 'output_bytes' or 'error_bytes', #ARGV[4])
for at = 6, #ARGV, 2 do redis.pcall('HINCRBY', KEYS[1], ARGV[at], ARGV[at + 1]) end
return 1
