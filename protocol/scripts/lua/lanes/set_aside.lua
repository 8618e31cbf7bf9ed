-- Leaves an entry of this worker to the workers of one kind: those with one model, or those of them that round alike.
--
-- KEYS: those of lanes.lua; from 14 on the heartbeat of all workers of that kind, who they are (`alike`), room, and the prefix of
-- nudges.
-- ARGV: 1 to 5 as in sized.lua; 6: the kind; 7: the entry; 8: for how long (ms) after it lost its worker, or '': as long as their
-- heartbeat lasts; 9: whether it has lost its worker now, if nobody noted when.
-- Answers 1, or 0 if no worker of that kind has been there for a while; or, with a time, if it is over, or none is there.
-- Loaded after shared/owned.lua, shared/homes.lua, lanes/places.lua and lanes/notes.lua.
local WOKEN = 8  -- workers that are told at most, of so many that are asked
local ASKED = 64
local kind, entry, wait, is_new = unpack(ARGV, 6, 9)
local heartbeat, alike, room, nudge_of = unpack(KEYS, 14, 17)
local now = clock()
local names = redis.call('ZRANGEBYSCORE', alike, string.format('(%d', now), '+inf', 'LIMIT', 0, ASKED)
local since = redis.call('ZSCORE', orphaned, entry) or (is_new == '1' and now)
if wait == '' then
  if redis.call('EXISTS', heartbeat) == 0 then return 0 end
else
  local passed_ms = since and now - tonumber(since) or -1
  if #names == 0 or passed_ms < 0 or passed_ms >= tonumber(wait) then return 0 end
end
local found = owned(requests, group, worker, entry) and place_known(entry, redis.call('HGET', charged, entry))
if not found or #redis.call('XCLAIM', requests, group, ASIDE .. kind, 0, entry, 'JUSTID') == 0 then return 1 end
redis.call('ZADD', aside_of .. kind, found.rank, found.member)
if wait == '' then
  redis.call('ZREM', orphaned, entry)
else
  redis.call('ZADD', orphaned, since, entry)
end
note(entry, found)
keep_notes()
local told = 0
for _, name in ipairs(names) do
  if told < WOKEN and tonumber(redis.call('ZSCORE', room, name) or 0) > 0 then
    nudge(nudge_of, name)
    told = told + 1
  end
end
return 1
