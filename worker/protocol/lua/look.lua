-- KEYS: looked. ARGV: worker, for how many ms nobody else need look. Answers whether this one is to look, and in how many ms
-- somebody should again. A key that lasts longer than that is of a worker that looks less often, or the server's clock was set
-- back: then this one does not wait for it.
local key, worker, rest = KEYS[1], ARGV[1], tonumber(ARGV[2])
redis.call('STRLEN', key)  -- SET would take the place of anything
local left = redis.call('PTTL', key)
if left >= 0 and left <= rest then return {0, left} end
redis.call('SET', key, worker, 'PX', rest)
return {1, rest}
