-- KEYS: calls, serving. ARGV: highest length, the longest wait of a call in ms, group, the entry's fields and values.
-- Returns the entry's id (nil if the stream is full), how many calls wait, and whether the queue is served.
--
-- The stream expires after its last call's longest wait, unless workers, which read it, keep it.
-- Loaded after shared/clock.lua.
local calls, serving = KEYS[1], KEYS[2]
local limit, longest, group = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local now = clock()
if redis.call('EXISTS', calls) == 0 then redis.call('XGROUP', 'CREATE', calls, group, '0', 'MKSTREAM') end
redis.call('XTRIM', calls, 'MINID', string.format('%d-0', now - longest))
local length, served = redis.call('XLEN', calls), redis.call('EXISTS', serving)
if length >= limit then return {false, length, served} end
local entry = redis.call('XADD', calls, '*', unpack(ARGV, 4))
redis.call('PEXPIRE', calls, longest)
return {entry, length + 1, served}
