-- KEYS: requests, seen; for a request with a time limit also load, its lane, its band, weights.
-- ARGV: highest length (0: none), time to live of `seen` in s, group; how many seconds it may wait, its priority, its
-- tenant; the entry's fields and values.
-- Returns the entry's id and whether it was there before; else nil, the queue's length and, if it is not full, how long the
-- request would wait.
-- Loaded after waiting.lua.
local entry = redis.call('GET', KEYS[2])
if entry then return {entry, 1} end
local limit = tonumber(ARGV[1])
local length = redis.call('XLEN', KEYS[1])
if limit > 0 and length >= limit then return {false, length} end
if KEYS[3] and length > 0 then
  local timeout = tonumber(ARGV[4])
  local wait = seconds_to_wait(KEYS[3], KEYS[4], KEYS[5], KEYS[6], timeout, tonumber(ARGV[5]), ARGV[6])
  if wait and wait > timeout then return {false, length, string.format('%.3f', wait)} end
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[3], '0', 'MKSTREAM')
end
entry = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 7))
redis.call('SET', KEYS[2], entry, 'EX', ARGV[2])
return {entry, 0}
