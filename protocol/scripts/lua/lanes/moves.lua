-- Moves entries between workers and those who wait, whatever their turn.
--
-- Reads the group's pending entries, `charged` and bodies. Writes the group, lanes, bands, `charged`, `due`, `passed`, `named` and
-- aside; what it notes and tallies is written by `keep_notes` and `keep_counts`.
-- Loaded after shared/sized.lua, lanes/backlog.lua, lanes/lanes.lua, lanes/places.lua, lanes/seats.lua and lanes/notes.lua.
local AGAIN = 1.6 * 10 ^ 12  -- ms by which an entry that a worker has had is due earlier, so before all that none has had
local bodies = {}  -- by id: new entries that this run has read, as in arrivals.lua
-- Notes that this worker has an entry that waited, and adds it to the answer. Returns whether the answer can hold more.
local function hand_over(entry, fields, was)
  local cost = tokens_of(was.size)
  if redis.call('HSETNX', charged, entry, cost .. noted(was)) == 1 then serve(was.tenant, cost) end
  redis.call('ZREM', due, entry)
  if was.slot then redis.call('ZREM', passed, entry) end
  if was.id then redis.call('HDEL', named, was.id) end
  if bodies[entry] then bodies[entry].is_taken = true end
  return add(entry, fields, was.size)
end

-- Does the same for an entry that has, or had, a place in a lane, and takes it out of there.
local function take_out(entry, fields)
  local was = place(entry, fields)
  tally(was.priority, -1, -was.size)
  local before = priority_next(was.tenant)
  redis.call('ZREM', lane_of .. was.tenant, was.member)
  seat(was.tenant, before, priority_next(was.tenant))
  return hand_over(entry, fields, was)
end

-- Gives an entry to this worker, if it waits. Returns whether it did, and whether the answer can hold more.
local function take_held(entry)
  local holder = holder_of(entry)
  local claimed = is_held(holder) and redis.call('XCLAIM', requests, group, worker, 0, entry)[1]
  if not claimed then return false, true end
  if holder == WAITING then return true, take_out(entry, claimed[2]) end
  local was = place(entry, claimed[2])
  redis.call('ZREM', aside_of .. string.sub(holder, #ASIDE + 1), was.member)
  return true, hand_over(entry, claimed[2], was)
end

-- Makes an entry that somebody has wait again. It keeps its charge. If workers had it (`has_had`), it goes before all entries of
-- its tenant and priority that no worker has had. Returns whether it is still there; if it was deleted, nothing is left of it.
local function put_back(entry, found, has_had)
  if not found or #redis.call('XCLAIM', requests, group, WAITING, 0, entry, 'TIME', SINCE, 'JUSTID') == 0 then
    redis.call('XACK', requests, group, entry)
    redis.call('HDEL', charged, entry)
    return false
  end
  local rank = has_had and rank_of(found.priority, math.max(0, found.before - AGAIN)) or found.rank
  tally(found.priority, 1, found.size)
  line_up({{name = found.tenant, priority = found.priority, ranked = {rank, found.member}}})
  note(entry, found)
  return true
end

-- Does the same with up to `limit` entries of a consumer, until it has read bodies of `most` bytes. Returns how many entries it
-- handled, whether there may be more, and which entries they were among.
local function put_back_all(consumer, limit)
  local entries = {}
  for i, item in ipairs(redis.call('XPENDING', requests, group, '-', '+', limit, consumer)) do entries[i] = item[1] end
  if #entries == 0 then return 0, false, entries end
  for i, text in ipairs(redis.call('HMGET', charged, unpack(entries))) do
    if bytes_read >= most then return i - 1, true, entries end
    put_back(entries[i], place_known(entries[i], text), true)
  end
  return #entries, #entries == limit, entries
end
