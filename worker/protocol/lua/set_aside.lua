-- After owned.lua and lanes.lua. KEYS[13]: the heartbeat of who it goes to. ARGV[6]: the digest of the model it goes to;
-- ARGV[7]: an entry of this worker.
local digest, entry = ARGV[6], ARGV[7]
if redis.call('EXISTS', KEYS[13]) == 0 then return 0 end
local found = owned(requests, group, worker, entry) and place_known(entry, redis.call('HGET', charged, entry))
if found and #redis.call('XCLAIM', requests, group, ASIDE .. digest, 0, entry, 'JUSTID') > 0 then
  redis.call('ZADD', aside_of .. digest, found.rank, found.member)
  note(entry, found)
  keep_notes()
end
return 1
