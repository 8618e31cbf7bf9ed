-- After lanes.lua. ARGV[6]: how many new entries get a place before. ARGV[7]: whether the oldest that waits was overtaken
-- often enough. Answers entries, whether there are more new ones, and the id of the oldest that waited before (or nil).
--
-- The highest priority goes first, then the tenant that has been served the least, then what is due first.
local AT_ONCE = 64  -- entries and tenants that one turn looks at
local AGED = 5000  -- ms: how long the oldest has waited at least if it goes out of turn
local has_more = lane_new(tonumber(ARGV[6]))
local tries, has_room = 0, true
count = tonumber(count)

local function oldest() return (redis.call('XPENDING', requests, group, '-', '+', 1, WAITING)[1] or {})[1] end

-- Tenants of a band, the least served first: name, counter, weight, the next entries and how many of them are chosen.
local function tenants_of(band, room)
  local found, names = {}, {}
  local counters = redis.call('ZRANGE', band_of .. band, 0, room - 1, 'WITHSCORES')
  for i = 1, #counters, 2 do
    names[#names + 1] = counters[i]
    found[#found + 1] = {name = counters[i], counter = tonumber(counters[i + 1]), chosen = 0}
  end
  if #names == 0 then return found end
  for i, weight in ipairs(redis.call('HMGET', weights, unpack(names))) do
    found[i].weight = valid_weight(weight)
  end
  return found
end

local function least_served(tenants)
  local least
  for i = 1, #tenants do  -- those behind the first that was not looked at yet have had more
    local each = tenants[i]
    if not each.is_done and (not least or each.counter < least.counter) then least = each end
    if not each.waiting then break end
  end
  return least
end

-- The members of lanes whose turn it is, in that order.
local function choose(band, tenants, room)
  local ids, bytes = {}, 0
  while #ids < room and bytes < most do
    local next = least_served(tenants)
    if not next then break end
    next.waiting = next.waiting or redis.call('ZRANGE', lane_of .. next.name, 0, room, 'WITHSCORES')
    local at = 2 * next.chosen + 1
    local name, rank = next.waiting[at], tonumber(next.waiting[at + 1])
    if name and priority_of(rank) == band then
      local id, size = entry_of(name)
      ids[#ids + 1], next.chosen, bytes = id, next.chosen + 1, bytes + size
      next.counter = next.counter + tokens_of(size) / next.weight
    else
      next.is_done = true
    end
  end
  return ids
end

-- Takes the chosen entries out of the lanes, and charges those that are not charged yet.
local function settle_choice(band, tenants, was_charged, room)
  local seated = {}
  for _, each in ipairs(tenants) do
    if each.waiting then
      local members = {}
      for i = 1, each.chosen do
        members[i] = each.waiting[2 * i - 1]
        local id, size = entry_of(members[i])
        if was_charged[id] then each.counter = each.counter - tokens_of(size) / each.weight end
      end
      if #members > 0 then redis.call('ZREM', lane_of .. each.name, unpack(members)) end
      local rank = tonumber(each.waiting[2 * each.chosen + 2])
      local now = rank and priority_of(rank)
      if not rank and each.chosen > room then now = priority_next(each.name) end
      if now ~= band then
        seat(each.name, band, now, each.counter)
      elseif each.chosen > 0 then
        seated[#seated + 1], seated[#seated + 2] = number(each.counter), each.name
      end
    end
  end
  if #seated > 0 then redis.call('ZADD', band_of .. band, unpack(seated)) end
end

local function take_from(band)
  local room = math.min(count - #found, AT_ONCE)
  local tenants = tenants_of(band, room)
  local ids = choose(band, tenants, room)
  local was_charged, costs = {}, {}
  if #ids > 0 then
    local before = redis.call('HMGET', charged, unpack(ids))
    local claimed = claim(ids)
    for i, id in ipairs(ids) do was_charged[id] = before[i] or nil end
    local is_here = {}
    for _, entry in ipairs(claimed) do
      is_here[entry[1]] = true
      if not was_charged[entry[1]] then
        costs[#costs + 1], costs[#costs + 2] = entry[1], tokens_of(size_of(entry[2]))
      end
      has_room = add(entry[1], entry[2])
    end
    for _, id in ipairs(ids) do was_charged[id] = was_charged[id] or not is_here[id] end
    if #costs > 0 then redis.call('HSET', charged, unpack(costs)) end
    redis.call('ZREM', due, unpack(ids))
  end
  settle_choice(band, tenants, was_charged, room)
  if #tenants == 0 then redis.call('ZREM', bands, band) end  -- somebody deleted it; what it held goes by its age
end

local overtaken = oldest()
if overtaken and count > 0 and ARGV[7] == '1' and clock() - string.match(overtaken, '^%d+') > AGED then
  has_room = take_out(overtaken)
end
while #found < count and has_room and tries < count + 64 do
  local band = redis.call('ZRANGE', bands, -1, -1)[1]
  if not band then break end
  take_from(tonumber(band))
  tries = tries + 1
end
while #found < count and has_room and tries < count + 64 do  -- what no lane has any more
  local entry = oldest()
  if not entry then break end
  has_room, tries = take_out(entry), tries + 1
end
return {found, has_more and 1 or 0, overtaken}
