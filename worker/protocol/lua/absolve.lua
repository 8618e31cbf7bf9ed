-- KEYS: state. ARGV: epoch of the claim whose owner lives.
local state, epoch = KEYS[1], ARGV[1]
local s = redis.call('HMGET', state, 'epoch', 'status')
if not s[1] or s[1] == epoch or s[2] == 'done' or s[2] == 'dead' then return 0 end
if redis.call('HSETNX', state, 'alive:' .. epoch, 1) == 0 then return 0 end
for _, count in ipairs({'crashes', 'strikes'}) do  -- what is no count there, the next claim finds
  if (tonumber(redis.call('HGET', state, count) or 0) or 0) > 0 then redis.pcall('HINCRBY', state, count, -1) end
end
return 1
