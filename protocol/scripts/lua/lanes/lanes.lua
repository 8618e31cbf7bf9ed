-- Says which consumers of the group hold entries that wait. protocol/keys.py describes the keys.
--
-- An entry that is pending for WAITING waits, whether or not it has a place in a lane: lanes only say which one is next. So a
-- script takes an entry from a lane only if it is pending for WAITING, and finds an entry that no lane has by its age. The
-- delivery time of what is pending for WAITING is in 1970. Within one XCLAIM, that tells it from an entry that a worker has,
-- whatever the server's clock says.
--
-- KEYS: those of accounts.lua; from 9 on passed, named, asked, the prefix of aside, and orphaned; the last one is backlog.
-- ARGV: 1 to 5 as in sized.lua.
-- Writes nothing.
-- Loaded after shared/sized.lua and lanes/accounts.lua.
local passed, named, asked, aside_of, orphaned = unpack(KEYS, 9, 13)
local WAITING, UNOWNED = 'waiting', 'unowned'
local ASIDE = UNOWNED .. '/'  -- a kind of workers follows; only workers of that kind continue such an entry
local SINCE, LEAST = 1, 3600000  -- ms: when entries of WAITING were delivered, and a time before which no worker's entry was
-- Returns the consumer that an entry is pending for; nil if it is pending for none, or is not an id.
local function holder_of(entry)
  if not string.match(entry, '^%d+%-%d+$') then return nil end
  return (redis.call('XPENDING', requests, group, entry, entry, 1)[1] or {})[2]
end

-- Returns whether the entries of a consumer wait for workers, be it for all or for those of one kind.
local function is_held(holder) return holder == WAITING or string.sub(holder or '', 1, #ASIDE) == ASIDE end
