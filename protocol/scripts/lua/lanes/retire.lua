-- Makes entries of a dead consumer wait again, and removes the consumer once it has none. It also removes the other keys that say
-- that the consumer serves. They lapse with its heartbeat, and may last longer if the server's clock was set back.
--
-- It wakes workers that have room for what it freed: what they may not continue they leave to others while there is time.
--
-- KEYS: those of lanes.lua; from 14 on the consumer's heartbeat, digests, room, serving, the consumer's nudges and report, lapses,
-- and the prefix of nudges.
-- ARGV: 1 to 5 as in sized.lua, where the consumer stands for the worker.
-- Answers how many entries it freed, or -1 if the consumer lives.
-- Loaded after shared/homes.lua and lanes/orphans.lua.
local WOKEN = 8  -- workers that one run wakes at most
if redis.call('EXISTS', KEYS[14]) == 1 then return -1 end
local digests, room, serving, nudges, report, lapses, nudge_of = unpack(KEYS, 15, 21)
redis.pcall('ZREM', serving, worker)
redis.call('XACK', nudges, group, '0-1')  -- fails over junk, which DEL would remove
redis.call('DEL', nudges)
redis.call('DEL', report)  -- another selector of users.acl allows this key
local freed, _, entries = put_back_all(worker, count)
if not is_held(worker) then
  local now = clock()
  note_orphans(entries, math.min(now, tonumber(redis.call('ZSCORE', lapses, worker) or now)))
end
keep_notes()
keep_counts()
if #redis.call('XPENDING', requests, group, '-', '+', 1, worker) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', requests, group, worker)
  redis.pcall('HDEL', digests, worker)
  redis.pcall('ZREM', room, worker)
  redis.pcall('ZREM', lapses, worker)
  if is_held(worker) then
    local aside = aside_of .. string.sub(worker, #ASIDE + 1)
    redis.call('ZRANGE', aside, 0, 0)
    redis.call('DEL', aside)
  end
end
if freed > 0 then
  local rooms = redis.pcall('ZRANGE', room, '+inf', '(0', 'BYSCORE', 'REV', 'LIMIT', 0, math.min(freed, WOKEN))
  for _, name in ipairs(rooms.err and {} or rooms) do nudge(nudge_of, name) end
end
return freed
