-- KEYS: state. ARGV: epoch, what to add to `handbacks`. What is no count there, the next claim finds.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'status')
if s[1] ~= ARGV[1] or s[2] ~= 'running' then return 0 end
redis.call('HSET', KEYS[1], 'status', 'queued')
redis.pcall('HINCRBY', KEYS[1], 'handbacks', ARGV[2])
return 1
