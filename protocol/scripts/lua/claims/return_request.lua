-- Hands a request back to the queue. If the state holds no count of hand-backs, the next claim finds that.
--
-- KEYS: state.
-- ARGV: epoch; what to add to `handbacks`.
-- Answers 1, or 0 if the request has another owner or does not run.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'status')
if s[1] ~= ARGV[1] or s[2] ~= 'running' then return 0 end
redis.call('HSET', KEYS[1], 'status', 'queued')
redis.pcall('HINCRBY', KEYS[1], 'handbacks', ARGV[2])
return 1
