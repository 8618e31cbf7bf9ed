-- Gives new entries their places, and gives this worker the entries that are next.
--
-- The highest priority goes first, then the tenant that has been served the least, then the entry that is due first. Entries that
-- are at home here, or nowhere, go before entries of the same tenant that have a home without capacity. Entries that were set
-- aside for this worker's model go before all others of their priority, because no other worker may take them.
--
-- KEYS: those of lanes.lua; from 13 on homes, room, serving, and the prefix of nudges.
-- ARGV: 1 to 5 as in sized.lua; 6: how many new entries get a place first; 7: how often all workers together may overtake the
-- oldest entry once it has waited for long; 8: the lowest priority that is taken; 9: how many more sequences this worker has
-- capacity for; 10: for how long (ms) an entry is left to its home; 11: the digest of this worker's model, if it is known.
-- Answers the entries, whether there are more new ones, and in how many ms any worker may take one that was left (or nil).
-- Loaded after lanes/lanes.lua and shared/homes.lua.
local homes, room, serving, nudge_of = unpack(KEYS, 13, 16)
local AT_ONCE = 64  -- entries and tenants that one turn looks at
local AGED = 5000  -- ms: an entry that has waited so long may be overtaken only so often
local OVERTAKES = 'overtakes'  -- a field of `backlog`: the oldest entry that has waited so long, and how often it was overtaken
local has_more = lane_new(tonumber(ARGV[6]))
local lowest, steal_after, now = tonumber(ARGV[8]), tonumber(ARGV[10]), clock()
local tries, has_room, left_ms, window = 0, true, nil, nil
local home, rooms = {}, {}  -- by slot; by worker
local digest = ARGV[11]
count = tonumber(count)

local function oldest(holder) return (redis.call('XPENDING', requests, group, '-', '+', 1, holder)[1] or {})[1] end

local has_aside = digest ~= '' and count > 0 and oldest(ASIDE .. digest) ~= nil  -- pending entries count, whatever the places say

-- Returns among how many entries of a tenant to search for those at home here. In a large fleet each worker has few homes, so
-- these are fewer.
local function width() return math.max(8, math.min(32, math.floor(1024 / math.max(1, redis.call('ZCARD', serving))))) end

-- Returns tenants of a band, the least served first.
local function tenants_of(band, how_many)
  local tenants, names = {}, {}
  local counters = redis.call('ZRANGE', band_of .. band, 0, how_many - 1, 'WITHSCORES')
  for i = 1, #counters, 2 do
    names[#names + 1] = counters[i]
    tenants[#tenants + 1] = {
      name = counters[i], counter = tonumber(counters[i + 1]), seen = {}, at = 1, chosen = {}, elsewhere = {}, left = {},
    }
  end
  if #names == 0 then return tenants end
  for i, weight in ipairs(redis.call('HMGET', weights, unpack(names))) do tenants[i].weight = valid_weight(weight) end
  return tenants
end

local function least_served(tenants)
  local least
  for i = 1, #tenants do  -- tenants behind the first that was not looked at have been served more
    local each = tenants[i]
    if not each.is_done and (not least or each.counter < least.counter) then least = each end
    if not each.is_looked_at then break end
  end
  return least
end

-- Notes where entries that have a slot are at home, and since when they were left there.
local function look_up(entries)
  local slots, ids = {}, {}
  for _, each in ipairs(entries) do
    if each.slot ~= '' then slots[#slots + 1], ids[#ids + 1] = each.slot, each.id end
  end
  if #slots == 0 then return end
  local names, since = redis.call('HMGET', homes, unpack(slots)), redis.call('ZMSCORE', passed, unpack(ids))
  for i, slot in ipairs(slots) do
    home[slot] = home[slot] or home_of(homes, serving, tonumber(slot), names[i]) or worker
    local name = home[slot]
    rooms[name] = rooms[name] or tonumber(redis.call('ZSCORE', room, name) or 0)
  end
  local at = 1
  for _, each in ipairs(entries) do
    if each.slot ~= '' then
      each.home, each.since, at = home[each.slot], tonumber(since[at]), at + 1
      if each.since and each.since > now then each.since = nil end  -- the clock was set back: it is left from now on
    end
  end
end

-- Reads the next entries of a tenant from its lane.
local function look_at_more(tenant, band, page)
  local first = #tenant.seen
  local found = redis.call('ZRANGE', lane_of .. tenant.name, first, first + page - 1, 'WITHSCORES')
  local entries = {}
  for i = 1, #found, 2 do
    if priority_of(tonumber(found[i + 1])) ~= band then break end
    local id, size, slot = entry_of(found[i])
    entries[#entries + 1] = {id = id, size = size, slot = slot, member = found[i]}
  end
  look_up(entries)
  for i, each in ipairs(entries) do tenant.seen[first + i] = each end
  tenant.is_looked_at, tenant.has_all = true, #entries < page
end

-- Returns the next entry of a tenant for this worker, and removes it from the choice; nil if there is none.
local function next_of(tenant, band, page)
  while #tenant.elsewhere + #tenant.left < window do
    local each = tenant.seen[tenant.at]
    if each then
      tenant.at = tenant.at + 1
      if not each.home or each.home == worker or (each.since and now - each.since >= steal_after) then return each end
      local group = tenant.left
      if rooms[each.home] == 0 then
        each.full_ms = left_to_full(each.id, each.size, now, steal_after)
        if each.full_ms <= 0 then group = tenant.elsewhere end
      end
      group[#group + 1] = each
    elseif tenant.has_all then
      break
    else
      look_at_more(tenant, band, #tenant.seen == 0 and page or math.max(page, window))
    end
  end
  return table.remove(tenant.elsewhere, 1)
end

-- Chooses entries in the order of their turns, and notes their tenants and estimated costs.
local function choose(band, tenants, wanted)
  local chosen, bytes, page = {}, 0, math.ceil(wanted / #tenants) + 1
  while #chosen < wanted and bytes < most do
    local tenant = least_served(tenants)
    if not tenant then break end
    local each = next_of(tenant, band, page)
    if each then
      each.tenant, each.cost, each.is_chosen = tenant, tokens_of(each.size), true
      tally(band, -1, -each.size)
      chosen[#chosen + 1], tenant.chosen[#tenant.chosen + 1] = each, each.member
      tenant.counter, bytes = tenant.counter + each.cost / tenant.weight, bytes + each.size
    else
      tenant.is_done = true
    end
  end
  return chosen
end

-- Gives entries to this worker if they wait. Returns the fields of those that do; bodies that this run has read are not read
-- again.
local function claim(read, unread)
  local fields_of, long = {}, string.format('%.0f', math.max(1, clock() - LEAST))
  if #unread > 0 then
    for _, entry in ipairs(redis.call('XCLAIM', requests, group, worker, long, unpack(unread))) do
      fields_of[entry[1]] = entry[2]
    end
  end
  if #read > 0 then
    read[#read + 1] = 'JUSTID'
    for _, id in ipairs(redis.call('XCLAIM', requests, group, worker, long, unpack(read))) do
      fields_of[id] = bodies[id].fields
    end
  end
  return fields_of
end

-- Removes entries from the keys that list them as waiting. Returns, by entry, what `charged` has of those that waited before this
-- run.
local function known_of(unread, moved)
  local before = {}
  if #unread > 0 then
    for i, text in ipairs(redis.call('HMGET', charged, unpack(unread))) do before[unread[i]] = text end
    redis.call('ZREM', due, unpack(unread))
  end
  if #moved > 0 then redis.call('ZREM', passed, unpack(moved)) end
  return before
end

-- Gives the chosen entries to the worker, and charges those that are not charged yet. An entry that no longer waits costs its
-- tenant nothing.
local function take_chosen(chosen)
  local read, unread, moved, gone, new = {}, {}, {}, {}, {}
  for _, each in ipairs(chosen) do
    local group_of = bodies[each.id] and read or unread
    group_of[#group_of + 1] = each.id
    if each.home then moved[#moved + 1] = each.id end
  end
  local before, fields_of = known_of(unread, moved), claim(read, unread)
  for _, each in ipairs(chosen) do
    local fields = fields_of[each.id]
    if fields then
      local was = bodies[each.id] or described(fields)
      has_room = add(each.id, fields, was.size)
      if was.id and not bodies[each.id] then gone[#gone + 1] = was.id end
      if not before[each.id] then new[#new + 1], new[#new + 2] = each.id, each.cost .. noted(was) end
      was.is_taken = true
    end
    if not fields or before[each.id] then each.tenant.counter = each.tenant.counter - each.cost / each.tenant.weight end
  end
  if #new > 0 then redis.call('HSET', charged, unpack(new)) end
  if #gone > 0 then redis.call('HDEL', named, unpack(gone)) end
end

-- Returns the priority of a tenant's next entry once the chosen ones are taken out.
local function next_priority(tenant, band)
  for _, each in ipairs(tenant.seen) do
    if not each.is_chosen then return band end
  end
  return priority_next(tenant.name)
end

-- Takes the chosen members out of their lanes, and moves the tenants to where they belong now.
local function reseat(band, tenants)
  local seated = {}
  for _, tenant in ipairs(tenants) do
    if tenant.is_looked_at then
      if #tenant.chosen > 0 then redis.call('ZREM', lane_of .. tenant.name, unpack(tenant.chosen)) end
      local priority = next_priority(tenant, band)
      if priority ~= band then
        seat(tenant.name, band, priority, tenant.counter)
      elseif #tenant.chosen > 0 then
        seated[#seated + 1], seated[#seated + 2] = number(tenant.counter), tenant.name
      end
    end
  end
  if #seated > 0 then redis.call('ZADD', band_of .. band, unpack(seated)) end
end

-- Tells workers that entries are left to them. An entry that was left before keeps its time.
local function leave(tenants)
  local new, told = {}, {}
  for _, tenant in ipairs(tenants) do
    for _, each in ipairs(tenant.left) do
      if not each.since and not each.full_ms then
        new[#new + 1], new[#new + 2] = number(now), each.id
        if not told[each.home] then
          told[each.home] = true
          nudge(nudge_of, each.home)
        end
      end
      local ms = each.full_ms and math.ceil(each.full_ms) or steal_after - now + (each.since or now)
      left_ms = math.min(left_ms or steal_after, ms)
    end
  end
  if #new > 0 then redis.call('ZADD', passed, 'LT', unpack(new)) end
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

-- Returns the next entry that was set aside for this worker's model, or nil.
local function next_aside()
  local first = has_aside and redis.call('ZRANGE', aside_of .. digest, 0, 0, 'WITHSCORES') or {}
  return first[1] and {member = first[1], priority = priority_of(tonumber(first[2]))} or nil
end

-- Returns how often an entry was overtaken.
local function overtakes_of(entry)
  local noted = redis.pcall('HGET', backlog, OVERTAKES)  -- measure.lua repairs a key that is no hash
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
    redis.call('ZREM', aside_of .. digest, aside.member)
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
if not (waiting or has_aside) then may_be_lost = false end  -- nothing waited
while may_be_lost and #found < count and has_room and tries < count + 64 do  -- entries that no lane has any more
  if not take_oldest(oldest(WAITING) or has_aside and oldest(ASIDE .. digest)) then break end
  tries = tries + 1
end
keep_notes()
keep_counts()
if aged and #found > 0 and not is_found(aged) then
  redis.pcall('HSET', backlog, OVERTAKES, string.format('%s %d', aged, overtakes + #found))
end
redis.call('ZADD', room, math.max(0, ARGV[9] - #found), worker)
return {found, has_more and 1 or 0, left_ms or false}
