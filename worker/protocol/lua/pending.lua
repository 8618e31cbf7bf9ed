-- After weighed.lua. KEYS: requests. ARGV[6]: the entry id to go on after.
--
-- The read beyond everything brings nothing, and makes the consumer known: Redis 7.0 does not list one that only waits.
local ms, number = '18446744073709551615', '18446744073709551614'  -- one less than what '>' stands for
redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', 1, 'STREAMS', KEYS[1], ms .. '-' .. number)
for _, item in ipairs(redis.call('XPENDING', KEYS[1], group, '(' .. ARGV[6], '+', count, worker)) do
  local entry = redis.call('XRANGE', KEYS[1], item[1], item[1])[1]
  if not hand_out(item[1], entry and entry[2] or {}) then break end
end
return found
