-- After clock.lua, junk.lua, overdue.lua and owned.lua. KEYS: calls, answers.
--
-- Whoever has the call answers it, once, and not after its time.
local group, worker, entry, timeout, ttl = unpack(ARGV, 1, 5)
if not owned(KEYS[1], group, worker, entry) then return 0 end
if tonumber(string.match(entry, '^%d+')) > 2 ^ 53 then  -- no call can follow it, and no clock has given it its id
  junk(KEYS[1])
  return 0
end
redis.call('XACK', KEYS[1], group, entry)
redis.call('XDEL', KEYS[1], entry)
if overdue(entry, timeout) then return 0 end
local oldest = string.format('%d-0', clock() - ttl)
local added = redis.pcall('XADD', KEYS[2], 'MINID', oldest, '*', unpack(ARGV, 6))
if type(added) ~= 'string' then return 0 end  -- somebody wrote something else there
redis.call('PEXPIRE', KEYS[2], ttl)
return 1
