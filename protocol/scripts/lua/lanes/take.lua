-- Gives new entries their places, and gives this worker the entries that are next.
--
-- The highest priority goes first, then the tenant that has been served the least, then the entry that is due first. Entries that
-- are at home here, or nowhere, go before entries of the same tenant that have a home without capacity. Entries that were set
-- aside for workers of this one's kind go before all others of their priority, because no other worker may take them.
--
-- KEYS: those of lanes.lua and left.lua.
-- ARGV: 1 to 5 as in sized.lua; 6: how many new entries get a place first; 7: how often all workers together may overtake the
-- oldest entry once it has waited for long; 8: the lowest priority that is taken; 9: how many more sequences this worker has
-- capacity for; 10: as in left.lua; 11 and 12: the kinds of this worker, by its model and by its arithmetic too, or ''; 13: for
-- how long (ms) an entry that lost its worker may be left to workers that round alike.
-- Answers the entries, whether there are more new ones, and in how many ms any worker may take one that was left to some (or
-- nil).
-- Writes, besides what its parts do, `room` and how often the oldest entry was overtaken.
-- Loaded after shared/junk.lua, lanes/arrivals.lua, lanes/given.lua and lanes/orphans.lua.
local AT_ONCE = 64  -- entries and tenants that one turn looks at
local AGED = 5000  -- ms: an entry that has waited so long may be overtaken only so often
local OVERTAKES = 'overtakes'  -- a field of `backlog`: the oldest entry that has waited so long, and how often it was overtaken
count = tonumber(count)
local free_ms = count > 0 and free_orphans(tonumber(ARGV[13])) or nil
keep_notes()  -- before any of them is given out
local has_more = lane_new(tonumber(ARGV[6]))
local lowest, tries = tonumber(ARGV[8]), 0
local function oldest(holder) return (redis.call('XPENDING', requests, group, '-', '+', 1, holder)[1] or {})[1] end

local kinds = {}  -- those of ours that entries were set aside for: only pending entries tell, not the places
for i = 11, 12 do
  if ARGV[i] ~= '' and count > 0 and oldest(ASIDE .. ARGV[i]) then kinds[#kinds + 1] = ARGV[i] end
end

-- Takes entries from a band. Returns how many.
local function take_from(band, how_many)
  local wanted = math.min(count - #found, AT_ONCE)
  window = window or width()
  local tenants = tenants_of(band, how_many)
  if #tenants == 0 then  -- somebody deleted the band; its entries go by their age
    redis.call('ZREM', bands, band)
    return 0
  end
  local chosen = choose(band, tenants, wanted)
  if #chosen > 0 then take_chosen(chosen) end
  reseat(band, tenants)
  leave(tenants)
  if #chosen == 0 and how_many < AT_ONCE and #tenants == how_many then return take_from(band, AT_ONCE) end
  return #chosen
end

-- Takes the oldest entry, which is known to wait. Returns whether there was one.
local function take_oldest(entry)
  if not entry then return false end
  local _
  _, has_room = take_held(entry)  -- if it was deleted, this drops it, and it is not pending any more
  return true
end

-- Returns the next entry that was set aside for workers of this one's kind, or nil.
local function next_aside()
  local first = nil
  for _, kind in ipairs(kinds) do
    local member, rank = unpack(redis.call('ZRANGE', aside_of .. kind, 0, 0, 'WITHSCORES'))
    if member and (not first or tonumber(rank) < first.rank) then first = {kind = kind, member = member, rank = tonumber(rank)} end
  end
  if first then first.priority = priority_of(first.rank) end
  return first
end

-- Returns the oldest entry that waits for any worker, or else for those of this one's kind.
local function oldest_of_all()
  local first = oldest(WAITING)
  for _, kind in ipairs(kinds) do first = first or oldest(ASIDE .. kind) end
  return first
end

-- Returns how often an entry was overtaken.
local function overtakes_of(entry)
  local noted = redis.pcall('HGET', backlog, OVERTAKES)  -- measure.lua repairs a key that is not a hash
  local of, times = string.match(type(noted) == 'string' and noted or '', '^(%S+) (%d+)$')
  return of == entry and tonumber(times) or 0
end

local function is_found(entry)
  for _, each in ipairs(found) do
    if each[1] == entry then return true end
  end
  return false
end

local waiting = count > 0 and oldest(WAITING) or nil
local aged = waiting
local since_aged = aged and now - string.match(aged, '^%d+')  -- below 0 if the clock was set back: its wait is unknown
if since_aged and since_aged >= 0 and since_aged <= AGED then aged = nil end
local overtakes = aged and overtakes_of(aged) or 0
if aged and lowest <= LOWEST and overtakes >= tonumber(ARGV[7]) then take_oldest(aged) end
local below, aside = '+inf', next_aside()
while #found < count and has_room and tries < count + 64 do
  local band = redis.call('ZRANGE', bands, below, lowest, 'BYSCORE', 'REV', 'LIMIT', 0, 1)[1]
  if band and not whole(band, LOWEST, HIGHEST) then
    junk(bands)
    band = nil
  end
  if aside and aside.priority >= lowest and aside.priority >= tonumber(band or LOWEST) then
    redis.call('ZREM', aside_of .. aside.kind, aside.member)
    local _, goes_on = take_held((entry_of(aside.member)))
    has_room, aside = goes_on, next_aside()
  elseif not band then
    break
  elseif take_from(tonumber(band), math.min(count - #found, AT_ONCE)) == 0 then
    below = '(' .. band
  end
  tries = tries + 1
end
local may_be_lost = left_ms == nil and lowest <= LOWEST
if not (waiting or #kinds > 0) then may_be_lost = false end  -- nothing waited
while may_be_lost and #found < count and has_room and tries < count + 64 do  -- entries that no lane has any more
  if not take_oldest(oldest_of_all()) then break end
  tries = tries + 1
end
keep_notes()
keep_counts()
if aged and #found > 0 and not is_found(aged) then
  redis.pcall('HSET', backlog, OVERTAKES, string.format('%s %d', aged, overtakes + #found))
end
redis.call('ZADD', room, math.max(0, ARGV[9] - #found), worker)
if free_ms then left_ms = math.min(left_ms or free_ms, free_ms) end
return {found, has_more and 1 or 0, left_ms or false}
