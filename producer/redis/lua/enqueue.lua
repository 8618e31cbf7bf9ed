-- KEYS: requests, seen. ARGV: highest length (0: none), time to live of `seen` in s, group, the entry's fields and values.
-- Answers the entry's id and whether it was there before, or nil and the length of a queue that is full.
local entry = redis.call('GET', KEYS[2])
if entry then return {entry, 1} end
local limit = tonumber(ARGV[1])
local length = redis.call('XLEN', KEYS[1])
if limit > 0 and length >= limit then return {false, length} end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[3], '0', 'MKSTREAM')
end
entry = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 4))
redis.call('SET', KEYS[2], entry, 'EX', ARGV[2])
return {entry, 0}
