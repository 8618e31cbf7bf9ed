-- Decides whether a worker is to look for dead workers. One looks for all, and then none need look for a while.
--
-- A key that lasts longer than this worker would set it belongs to a worker that looks less often, or the server's clock was set
-- back. Then this worker does not wait for it.
--
-- KEYS: looked.
-- ARGV: worker; for how many ms no other worker need look.
-- Answers whether this worker is to look, and in how many ms somebody should look again.
local key, worker, rest = KEYS[1], ARGV[1], tonumber(ARGV[2])
redis.call('STRLEN', key)  -- fails over junk, which SET would replace
local left = redis.call('PTTL', key)
if left >= 0 and left <= rest then return {0, left} end
redis.call('SET', key, worker, 'PX', rest)
return {1, rest}
