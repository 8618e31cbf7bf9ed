-- After clock.lua. KEYS: workers, load. ARGV: worker, in how many ms a look is due, what the worker says of itself.
-- Answers how many requests waited at the last look, and whether the next one is due.
local workers, load = KEYS[1], KEYS[2]
local now = clock()
local part = string.format('%d %s', now, ARGV[3])
if type(redis.pcall('HSET', workers, ARGV[1], part)) ~= 'number' then  -- somebody wrote something else there
  redis.call('DEL', workers)
  redis.call('HSET', workers, ARGV[1], part)
end
local last = redis.pcall('HMGET', load, 'at_ms', 'waiting')
if last.err then  -- somebody wrote something else there
  redis.call('DEL', load)
  last = {}
end
local since = now - (tonumber(last[1] or 0) or 0)
return {tonumber(last[2] or 0) or 0, (since < 0 or since >= tonumber(ARGV[2])) and 1 or 0}
