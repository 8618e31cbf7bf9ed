-- KEYS: letters, sizes, sum, requests, seen.
-- ARGV: letter, time to live of `seen` in s, group, the new entry's fields and values.
-- Loaded after letter.lua.
local requests, seen = KEYS[4], KEYS[5]
local entry = redis.call('GET', seen)
if entry then return entry end
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then return false end
if redis.call('EXISTS', requests) == 0 then
  redis.call('XGROUP', 'CREATE', requests, ARGV[3], '0', 'MKSTREAM')
end
entry = redis.call('XADD', requests, '*', unpack(ARGV, 4))
redis.call('SET', seen, entry, 'EX', ARGV[2])
remove(ARGV[1])
return entry
