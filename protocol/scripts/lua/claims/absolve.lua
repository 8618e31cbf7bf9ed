-- Takes back the crash that the next claim counted, because the owner of the earlier claim was frozen and not dead.
--
-- KEYS: state.
-- ARGV: the epoch of the earlier claim.
-- Answers 1; or 0 if no other claim followed, the request has ended, or the crash was taken back before.
local state, epoch = KEYS[1], ARGV[1]
local s = redis.call('HMGET', state, 'epoch', 'status')
if not s[1] or s[1] == epoch or s[2] == 'done' or s[2] == 'dead' then return 0 end
if redis.call('HSETNX', state, 'alive:' .. epoch, 1) == 0 then return 0 end
for _, count in ipairs({'crashes', 'strikes'}) do  -- the next claim reports a field that holds no count
  if (tonumber(redis.call('HGET', state, count) or 0) or 0) > 0 then redis.pcall('HINCRBY', state, count, -1) end
end
return 1
