-- Reads entries that are pending for a worker. The read after the last possible id returns nothing, and makes the consumer
-- known: Redis 7.0 does not list a consumer that only waits.
--
-- KEYS: requests.
-- ARGV: 1 to 5 as in sized.lua; 6: the entry id to go on after.
-- Answers as in sized.lua.
-- Loaded after shared/sized.lua.
local ms, number = '18446744073709551615', '18446744073709551614'  -- one less than what '>' stands for
redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', 1, 'STREAMS', KEYS[1], ms .. '-' .. number)
for _, item in ipairs(redis.call('XPENDING', KEYS[1], group, '(' .. ARGV[6], '+', count, worker)) do
  local entry = redis.call('XRANGE', KEYS[1], item[1], item[1])[1]
  if not add(item[1], entry and entry[2] or {}) then break end
end
return found
