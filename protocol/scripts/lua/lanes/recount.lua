-- Counts what waits, by priority. It uses the counts that backlog.lua keeps; if they are wrong, it counts anew, page by page.
--
-- KEYS: as in fleet.lua.
-- Loaded after lanes/backlog.lua, lanes/places.lua and lanes/fleet.lua.
local RECOUNTED = 500  -- entries that one run counts

local function oldest_of(consumer)
  local first = redis.pcall('XPENDING', requests, group, '-', '+', 1, consumer)[1]
  return first and first[1]
end

local function ms_since(entry)
  return entry and math.max(0, now - string.match(entry, '^%d+')) or 0
end

local function priority_and_size(entry)
  local was = place_known(entry, redis.call('HGET', charged, entry)) or place(entry, {})
  return was.priority, was.size
end

-- Returns the priority of the oldest entry, which is looked up once for each.
local function priority_of_oldest(entry)
  local known = redis.pcall('HGET', backlog, 'oldest')
  local of, priority = string.match(type(known) == 'string' and known or '', '^(%S+) (%-?%d+)$')
  if of == entry then return tonumber(priority) end
  priority = priority_and_size(entry)
  redis.pcall('HSET', backlog, 'oldest', string.format('%s %d', entry, priority))
  return priority
end

-- Returns entries and bytes of each priority, and the entries of all.
local function counts()
  local values, bands, all = redis.call('HGETALL', backlog), {}, 0
  for i = 1, #values, 2 do
    local priority, what = string.match(values[i], '^(%-?%d+) (%a+)$')
    if priority then
      local band = bands[tonumber(priority)] or {entries = 0, bytes = 0}
      bands[tonumber(priority)], band[what] = band, tonumber(values[i + 1]) or 0
    end
  end
  for _, band in pairs(bands) do all = all + band.entries end
  return bands, all
end

-- Counts a page of what waits, from where the last page ended up to what was pending when the recount began. Entries that were
-- taken before they were counted are missing in the end, which is made up for at once.
local function recount(placed, cursor, last)
  local page = redis.call('XPENDING', requests, group, '(' .. cursor, last, RECOUNTED, WAITING)
  local read = 0
  for i, item in ipairs(page) do
    local priority, size = priority_and_size(item[1])
    tally(priority, 1, size)
    cursor, read = item[1], read + size
    if read >= most or i == RECOUNTED then
      redis.call('HSET', backlog, 'cursor', cursor, 'last', last)
      keep_counts()
      return
    end
  end
  keep_counts()
  redis.call('HDEL', backlog, 'cursor', 'last')
  local bands, all = counts()
  for priority, band in pairs(bands) do
    if band.entries <= 0 or band.bytes < 0 then
      redis.call('HDEL', backlog, priority .. ' entries', priority .. ' bytes')
      all = all - band.entries
    end
  end
  entries_of, bytes_of = {}, {}
  if all ~= placed then tally((priority_and_size(oldest_of(WAITING))), placed - all, 0) end
  keep_counts()
end

-- Returns the counts of entries that have a place, as far as they are counted. Counts that do not match are made anew: somebody
-- deleted entries, or a worker from before lanes took some.
local function counted(placed, last, cursor, bands, all)
  if placed == 0 then
    redis.call('DEL', backlog)
    return {}, 0
  end
  if cursor[1] and cursor[2] then
    recount(placed, cursor[1], cursor[2])
  elseif all ~= placed then
    redis.call('DEL', backlog)
    recount(placed, '0-0', last)
  else
    return bands, all
  end
  return counts()
end
