-- Makes a dead letter of an entry that this worker has, and removes the entry from the queue.
--
-- `sizes` has an entry for each letter, under the letter's id, because a worker may not read letters. The oldest letters are
-- removed while a limit is exceeded; the new letter stays whatever its size. A letter that somebody deleted by hand counts until
-- it would be the oldest.
--
-- KEYS: requests, letters, sizes, sum, charged, seen.
-- ARGV: group, worker, entry; the letter's size (bytes); the limits of letters, of bytes and of age (ms); then the letter's
-- fields and values.
-- Answers 1, or 0 if the entry is not pending for this worker.
-- Loaded after shared/clock.lua, shared/junk.lua, shared/owned.lua and shared/forget.lua.
local requests, letters, sizes, sum, charged, seen = unpack(KEYS, 1, 6)
local group, worker, entry, size = unpack(ARGV, 1, 4)
local max_entries, max_bytes, ttl = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if not owned(requests, group, worker, entry) then return 0 end
-- These keys are read before anything is written, so that junk in them shows first.
local bytes, count = redis.call('GET', sum), redis.call('XLEN', sizes)
if bytes and not string.match(bytes, '^%d+$') then
  junk(sum)
  bytes = nil
end
bytes = redis.call('XLEN', letters) > 0 and tonumber(bytes) or nil
redis.call('HMGET', charged, entry)
local letter = redis.call('XADD', letters, 'MAXLEN', '=', max_entries, '*', unpack(ARGV, 8))
redis.call('XACK', requests, group, entry)
redis.call('XDEL', requests, entry)
redis.call('HDEL', charged, entry)
forget(seen, {[entry] = true})

if not bytes then  -- this is the first letter, or they are counted anew
  redis.call('DEL', sizes, sum)
  bytes, count = 0, 0
end
if type(redis.pcall('XADD', sizes, letter, 'bytes', size)) ~= 'string' then  -- somebody added an id that nothing can follow
  redis.call('DEL', sizes)
  redis.call('XADD', sizes, letter, 'bytes', size)
  bytes, count = 0, 0
end
bytes, count = bytes + size, count + 1

local removed, oldest, since = 0, nil, clock() - ttl
while removed < 1000 do
  oldest = redis.call('XRANGE', sizes, '-', '+', 'COUNT', 1)[1]
  local is_old = tonumber(string.match(oldest[1], '^%d+')) < since
  if oldest[1] == letter or not (is_old or count > max_entries or bytes > max_bytes) then break end
  redis.call('XDEL', sizes, oldest[1])
  removed, count, bytes = removed + 1, count - 1, bytes - (tonumber(oldest[2][2]) or 0)
end
redis.call('XTRIM', letters, 'MINID', '=', oldest[1])
redis.call('SET', sum, string.format('%d', math.max(bytes, 0)), 'PX', ttl)
redis.call('PEXPIRE', sizes, ttl)
redis.call('PEXPIRE', letters, ttl)
return 1
