-- Chooses the entries of a band that are next for this worker: the least served tenant first, then what is due first.
--
-- Reads the band, lanes and `weights`, and what left.lua does. Writes nothing; it tallies what it has chosen.
-- A tenant here has its entries as far as they were `seen`; those `chosen`, as members; and those `elsewhere`, whose homes are
-- full, and `left` to their homes.
-- Loaded after lanes/backlog.lua, lanes/places.lua and lanes/left.lua.
local window  -- among how many entries of a tenant a turn searches
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
