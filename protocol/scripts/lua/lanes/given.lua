-- Gives chosen entries to this worker, and seats their tenants again.
--
-- Reads tenants as turns.lua has them, `charged`, and the lane of a tenant whose entries were all chosen. Writes the group, lanes,
-- bands, `charged`, `due`, `passed` and `named`, and adds to the answer. `has_room` says whether that can hold more.
-- Loaded after lanes/moves.lua and lanes/turns.lua.
local has_room = true
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
