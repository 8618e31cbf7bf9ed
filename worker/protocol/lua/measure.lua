-- After lanes.lua. The three last of KEYS: load, workers, backlog. ARGV from 6 on: how many ms must have passed since the last
-- look, and in how many seconds what waits is to have begun. Answers how many requests wait.
--
-- Writes down how the queue stands: once a second, whichever worker comes first. It walks no lane, and reads no more bodies
-- than one, unless it has to count anew.
local load, workers = KEYS[#KEYS - 2], KEYS[#KEYS - 1]
local every, target = tonumber(ARGV[6]), tonumber(ARGV[7])
local LAPSE, KEPT = 5000, 3600000  -- ms: what a worker says is good for, and so are the numbers without a worker
local UNOWNED = 'unowned'  -- holds what was given back; what follows a slash there, is set aside for a model
local MOST_BANDS, MOST_TENANTS = 64, 16  -- that are told apart; and of each band those looked at for the oldest
local MOST_WORKERS = 500  -- that one look asks
local RECOUNTED = 500  -- entries that one look counts
local now = clock()

local before = redis.call('HMGET', load, 'at_ms', 'waiting', 'worker_rate', 'reply_tokens', 'token_bytes')
local since = now - (tonumber(before[1] or 0) or 0)
if since >= 0 and since < every then return tonumber(before[2] or 0) end

-- Of the workers that serve: how many, what they can do, and what their requests are like. Of many some are asked for all.
local function fleet()
  local count, places, sum, rated, replies, replied, sizes, sized = 0, 0, 0, 0, 0, 0, 0, 0
  local all, parts, gone = redis.call('HLEN', workers), nil, {}
  if all > MOST_WORKERS then
    parts = redis.call('HRANDFIELD', workers, MOST_WORKERS, 'WITHVALUES')
  else
    parts = redis.call('HGETALL', workers)
  end
  for i = 1, #parts, 2 do
    local at, of_slots, of_rate, of_reply, of_token = string.match(parts[i + 1], '^(%d+) (%S+) (%S+) (%S+) (%S+)$')
    local room, speed = tonumber(of_slots or ''), tonumber(of_rate or '')
    local tokens, size = tonumber(of_reply or ''), tonumber(of_token or '')
    if not (room and speed and tokens and size) or now - tonumber(at) > LAPSE then
      gone[#gone + 1] = parts[i]
    elseif room > 0 then  -- one that drains has none for anybody
      count, places = count + 1, places + room
      if speed > 0 then sum, rated = sum + speed, rated + 1 end
      if tokens > 0 then replies, replied = replies + tokens, replied + 1 end
      if size > 0 then sizes, sized = sizes + size, sized + 1 end
    end
  end
  if #gone > 0 then redis.call('HDEL', workers, unpack(gone)) end
  local each = math.max(1, all / MOST_WORKERS)
  return math.floor(count * each + 0.5), places * each, rated > 0 and sum / rated, replied > 0 and replies / replied, sized > 0 and sizes / sized
end

-- How many consumers the group has, and how many entries are pending; nil where there is no group.
local function group_size()
  local groups = redis.pcall('XINFO', 'GROUPS', requests)
  for _, each in ipairs(groups.err and {} or groups) do
    local of = {}
    for i = 1, #each, 2 do of[each[i]] = each[i + 1] end
    if of.name == group then return of.consumers, of.pending end
  end
end

-- Entries that nobody has, those of them that have a place, those that workers have, and the largest id that anybody has.
--
-- The server counts by consumer. Where these are many it is asked now and then, and our own counts, if there are such, are good
-- in between.
local function standing(entries)
  local length, consumers, all = redis.call('XLEN', requests), group_size()
  if not consumers then return length, 0, 0 end
  if entries and consumers > MOST_WORKERS and now % math.ceil(consumers / MOST_WORKERS) > 0 then
    local given_back = #redis.call('XPENDING', requests, group, '-', '+', MOST_WORKERS, UNOWNED)
    local running = math.max(0, all - entries - given_back)
    return math.max(0, length - running), entries, running
  end
  local pending = redis.call('XPENDING', requests, group)
  local placed, held = 0, 0
  for _, each in ipairs(pending[4] or {}) do
    if each[1] == WAITING then placed = tonumber(each[2]) end
    if each[1] == WAITING or string.match(each[1], '^[^/]*') == UNOWNED then held = held + tonumber(each[2]) end
  end
  local running = pending[1] - held
  return math.max(0, length - running), placed, running, pending[3]
end

local function oldest_of(consumer)
  local first = redis.pcall('XPENDING', requests, group, '-', '+', 1, consumer)[1]
  return first and first[1]
end

local function ms_since(entry)
  return entry and math.max(0, now - string.match(entry, '^%d+')) or 0
end

local function priority_and_size(entry)
  local found = redis.call('XRANGE', requests, entry, entry)[1]
  local fields = found and found[2] or {}
  local _, rank = place(entry, fields)
  return priority_of(rank), size_of(fields)
end

-- Of each priority entries and bytes, and the entries of all.
local function counts()
  local values, bands, all = redis.pcall('HGETALL', backlog), {}, 0
  if values.err then  -- somebody wrote something else there
    redis.call('DEL', backlog)
    return bands, all
  end
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

-- Counts a page of what waits, from where the last one ended up to what came since. What was taken meanwhile before it was
-- counted is missing in the end, and made up for at once.
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

-- What has a place, by priority, as far as it is counted. Where the counts are not of what waits (somebody deleted some, or a
-- worker from before lanes took some), they are made anew.
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

-- Tenants of a band, those that were served most, and of higher ones some that may have lower ones behind.
local function tenants_below(priority, above)
  local tenants = redis.call('ZRANGE', band_of .. priority, 0, MOST_TENANTS - 1, 'REV')
  for i = 1, math.min(#above, 2 * MOST_TENANTS - #tenants) do tenants[#tenants + 1] = above[i] end
  return tenants
end

-- For how long (ms) the longest has waited of what is next of these tenants with this priority: nobody waits longer, as far as
-- they are due in their turn.
local function ms_waited(priority, tenants)
  local longest, from, to = 0, number((1000 - priority) * SPAN), '(' .. number((1001 - priority) * SPAN)
  for _, tenant in ipairs(tenants) do
    local first = redis.call('ZRANGEBYSCORE', lane_of .. tenant, from, to, 'LIMIT', 0, 1)[1]
    if first then longest = math.max(longest, ms_since((entry_of(first)))) end
  end
  return longest
end

-- Of each priority, the highest first: entries, tokens, and for how long the oldest has waited.
local function told(bands, oldest, tokens_per_byte, reply)
  local priorities, texts = {}, {}
  for priority, band in pairs(bands) do
    if band.entries > 0 then priorities[#priorities + 1] = priority end
  end
  table.sort(priorities, function(one, other) return one > other end)
  local of_oldest, tenants = oldest and priority_and_size(oldest), {}
  for i = 1, math.min(#priorities, MOST_BANDS) do
    local priority = priorities[i]
    local band = bands[priority]
    local tokens = math.ceil(math.max(0, band.bytes) * tokens_per_byte + band.entries * reply)
    tenants = tenants_below(priority, tenants)
    local waited = priority == of_oldest and ms_since(oldest) or ms_waited(priority, tenants)
    texts[i] = string.format('%d:%d:%.0f:%.0f', priority, band.entries, tokens, waited)
  end
  return table.concat(texts, ' ')
end

-- How many workers would hold what runs, and begin what waits within the target. Of their speed something must be known:
-- until then, those that there are.
local function wanted(waiting, tokens, running, count, places, each_rate)
  if waiting + running == 0 then return 0 end
  local busy = places > 0 and running / (places / count) or 1
  if waiting > 0 then
    busy = each_rate and busy + tokens / (each_rate * target) or math.max(busy, count)
  end
  return math.max(1, math.min(math.ceil(busy), waiting + running))
end

local function rounded(value) return string.format('%.6g', value) end

local num_workers, places, rate, reply, size = fleet()
rate = rate or tonumber(before[3] or 0) or 0
reply, size = reply or tonumber(before[4] or 0) or 0, size or tonumber(before[5] or '') or BYTES_PER_TOKEN
local bands, entries = counts()
local cursor = redis.call('HMGET', backlog, 'cursor', 'last')
local waiting, placed, running, last = standing(not cursor[1] and entries or nil)
bands, entries = counted(placed, last, cursor, bands, entries)
local total = 0
for _, band in pairs(bands) do total = total + math.max(0, band.bytes) end
local mean = entries > 0 and total / entries or 0
local tokens = math.ceil(waiting * (mean / size + reply))
local oldest = oldest_of(WAITING)
redis.call('HSET', load, 'at_ms', now, 'waiting', waiting, 'waiting_tokens', tokens,
  'oldest_ms', math.max(ms_since(oldest), ms_since(oldest_of(UNOWNED))), 'bands', told(bands, oldest, 1 / size, reply),
  'running', running, 'workers', num_workers, 'slots', rounded(places), 'rate', rounded(num_workers * rate),
  'worker_rate', rounded(rate), 'reply_tokens', rounded(reply), 'token_bytes', rounded(size),
  'wanted_workers', wanted(waiting, tokens, running, num_workers, places, rate > 0 and rate))
redis.call('PEXPIRE', load, KEPT)
redis.call('PEXPIRE', workers, KEPT)
return waiting
