-- Writes the answer to a call and removes the call. Only the worker that has the call can answer it, once, and not after its
-- time.
--
-- KEYS: calls, answers.
-- ARGV: group, worker, entry; the call's timeout (ms); how long the answer is kept (ms); then the answer's fields and values.
-- Answers 1; or 0 if another worker has the call, its time is over, or a key holds junk.
-- Loaded after shared/clock.lua, shared/junk.lua, calls/overdue.lua and shared/owned.lua.
local group, worker, entry, timeout, ttl = unpack(ARGV, 1, 5)
if not owned(KEYS[1], group, worker, entry) then return 0 end
if tonumber(string.match(entry, '^%d+')) > 2 ^ 53 then  -- no clock gave this id, and no call can follow it
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
