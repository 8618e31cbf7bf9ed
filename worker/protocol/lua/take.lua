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

-- Tenants of a band, the least served first.
local function tenants_of(band, room)
  local tenants, names = {}, {}
  local counters = redis.call('ZRANGE', band_of .. band, 0, room - 1, 'WITHSCORES')
  for i = 1, #counters, 2 do
    names[#names + 1] = counters[i]
    tenants[#tenants + 1] = {name = counters[i], counter = tonumber(counters[i + 1]), members = {}}
  end
  if #names == 0 then return tenants end
  for i, weight in ipairs(redis.call('HMGET', weights, unpack(names))) do tenants[i].weight = valid_weight(weight) end
  return tenants
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

-- Whose turn it is, in that order: entries' ids, and of each its tenant and what it is estimated to cost. Members that are
-- chosen are noted with their tenants, and so is what these will have been served.
local function choose(band, tenants, room)
  local ids, owners, costs, bytes = {}, {}, {}, 0
  while #ids < room and bytes < most do
    local tenant = least_served(tenants)
    if not tenant then break end
    tenant.waiting = tenant.waiting or redis.call('ZRANGE', lane_of .. tenant.name, 0, room, 'WITHSCORES')
    local place = #tenant.members + 1
    local name, rank = tenant.waiting[2 * place - 1], tonumber(tenant.waiting[2 * place])
    if name and priority_of(rank) == band then
      local id, size = entry_of(name)
      local cost = tokens_of(size)
      tally(band, -1, -size)
      ids[#ids + 1], owners[#owners + 1], costs[#costs + 1] = id, tenant, cost
      tenant.members[place], tenant.counter, bytes = name, tenant.counter + cost / tenant.weight, bytes + size
    else
      tenant.is_done = true
    end
  end
  return ids, owners, costs
end

-- Gives the chosen entries to the worker, and charges those that are not charged yet. One that does not wait any more costs
-- its tenant nothing.
local function take_chosen(ids, owners, costs)
  local before, is_here, new = redis.call('HMGET', charged, unpack(ids)), {}, {}
  for _, entry in ipairs(claim(ids)) do
    is_here[entry[1]] = true
    has_room = add(entry[1], entry[2])
  end
  for i, id in ipairs(ids) do
    if is_here[id] and not before[i] then
      new[#new + 1], new[#new + 2] = id, costs[i]
    else
      owners[i].counter = owners[i].counter - costs[i] / owners[i].weight
    end
  end
  if #new > 0 then redis.call('HSET', charged, unpack(new)) end
  redis.call('ZREM', due, unpack(ids))
end

-- Takes the chosen members out of their lanes, and puts the tenants where they belong now.
local function reseat(band, tenants)
  local seated = {}
  for _, tenant in ipairs(tenants) do
    if tenant.waiting then
      local chosen = #tenant.members
      if chosen > 0 then redis.call('ZREM', lane_of .. tenant.name, unpack(tenant.members)) end
      local rank = tonumber(tenant.waiting[2 * chosen + 2])
      local now = rank and priority_of(rank)
      if now ~= band then
        seat(tenant.name, band, now, tenant.counter)
      elseif chosen > 0 then
        seated[#seated + 1], seated[#seated + 2] = number(tenant.counter), tenant.name
      end
    end
  end
  if #seated > 0 then redis.call('ZADD', band_of .. band, unpack(seated)) end
end

local function take_from(band)
  local room = math.min(count - #found, AT_ONCE)
  local tenants = tenants_of(band, room)
  local ids, owners, costs = choose(band, tenants, room)
  if #ids > 0 then take_chosen(ids, owners, costs) end
  reseat(band, tenants)
  if #tenants == 0 then redis.call('ZREM', bands, band) end  -- somebody deleted it; what it held goes by its age
end

-- Takes the oldest, which is known to wait. Answers whether there was one.
local function take_oldest(entry)
  if not entry then return false end
  local claimed = redis.call('XCLAIM', requests, group, worker, 0, entry)[1]
  if claimed then has_room = take_out(claimed[1], claimed[2]) end  -- or it was deleted, and is not pending any more
  return true
end

local overtaken = oldest()
if overtaken and count > 0 and ARGV[7] == '1' and clock() - string.match(overtaken, '^%d+') > AGED then
  take_oldest(overtaken)
end
while #found < count and has_room and tries < count + 64 do
  local band = redis.call('ZRANGE', bands, -1, -1)[1]
  if not band then break end
  take_from(tonumber(band))
  tries = tries + 1
end
while #found < count and has_room and tries < count + 64 do  -- what no lane has any more
  if not take_oldest(oldest()) then break end
  tries = tries + 1
end
keep_counts()
return {found, has_more and 1 or 0, overtaken}
