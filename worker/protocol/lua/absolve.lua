-- KEYS: state. ARGV: epoch of the claim whose owner lives.
local state, epoch = KEYS[1], ARGV[1]
local s = redis.call('HMGET', state, 'epoch', 'status', 'strikes')
if not s[1] or s[1] == epoch or s[2] == 'done' or s[2] == 'dead' then return 0 end
if redis.call('HSETNX', state, 'alive:' .. epoch, 1) == 0 then return 0 end
if tonumber(redis.call('HMGET', state, 'crashes')[1] or 0) > 0 then redis.call('HINCRBY', state, 'crashes', -1) end
if tonumber(s[3] or 0) > 0 then redis.call('HINCRBY', state, 'strikes', -1) end
return 1
