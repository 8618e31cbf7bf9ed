-- Leaves an entry of this worker to the workers with one model.
--
-- KEYS: those of lanes.lua; 13: the heartbeat of all workers with that model.
-- ARGV: 1 to 5 as in sized.lua; 6: the digest of that model; 7: the entry.
-- Answers 1, or 0 if no worker with that model has been there for a while.
-- Loaded after shared/owned.lua, lanes/places.lua and lanes/notes.lua.
local digest, entry = ARGV[6], ARGV[7]
if redis.call('EXISTS', KEYS[13]) == 0 then return 0 end
local found = owned(requests, group, worker, entry) and place_known(entry, redis.call('HGET', charged, entry))
if found and #redis.call('XCLAIM', requests, group, ASIDE .. digest, 0, entry, 'JUSTID') > 0 then
  redis.call('ZADD', aside_of .. digest, found.rank, found.member)
  note(entry, found)
  keep_notes()
end
return 1
