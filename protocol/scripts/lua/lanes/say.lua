-- Notes what a worker says that it can do.
--
-- KEYS: workers, load.
-- ARGV: worker; in how many ms a measurement is due; what the worker says of itself.
-- Answers how many requests waited at the last measurement, and whether the next one is due.
-- Loaded after shared/clock.lua.
local workers, load = KEYS[1], KEYS[2]
local now = clock()
local part = string.format('%d %s', now, ARGV[3])
redis.call('HSET', workers, ARGV[1], part)
local last = redis.call('HMGET', load, 'at_ms', 'waiting')
local since = now - (tonumber(last[1] or 0) or 0)
return {tonumber(last[2] or 0) or 0, (since < 0 or since >= tonumber(ARGV[2])) and 1 or 0}
