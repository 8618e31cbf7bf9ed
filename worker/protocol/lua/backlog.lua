-- After accounts.lua. What waits is counted as it gets its place and as that goes. The last two of KEYS: backlog, ages.
--
-- `backlog` has entries and bytes, in all and of each priority, and for each priority and second the entries that were
-- appended then; `ages` has the latter in order. The counts are of what is pending for WAITING, and are made anew where they
-- are not (measure.lua). While they are, what has an id up to `cursor` or above `last` is counted, and the rest is not yet.
local backlog, ages = KEYS[#KEYS - 1], KEYS[#KEYS]
local moves = {}  -- of each its entry, priority, bytes, and 1 or -1

local function move(entry, priority, size, by)
  local at = #moves
  moves[at + 1], moves[at + 2], moves[at + 3], moves[at + 4] = entry, priority, size, by
end

local function count_in(entry, priority, size) move(entry, priority, size, 1) end

local function count_out(entry, priority, size) move(entry, priority, size, -1) end

local function is_after(entry, other)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  local other_ms, other_number = string.match(other, '^(%d+)-(%d+)$')
  if ms ~= other_ms then return tonumber(ms) > tonumber(other_ms) end
  return tonumber(number) > tonumber(other_number)
end

-- What the moves change, by field, and the second and priority of those fields that have one.
local function changes(cursor, last)
  local bands = {}
  for at = 1, #moves, 4 do
    local entry, priority, size, by = moves[at], moves[at + 1], moves[at + 2], moves[at + 3]
    if not cursor or not is_after(entry, cursor) or is_after(entry, last) then
      local second = math.floor(math.min(tonumber(string.match(entry, '^%d+')), SPAN / 2) / 1000)
      local band = bands[priority] or {entries = 0, bytes = 0, seconds = {}}
      bands[priority], band.entries, band.bytes = band, band.entries + by, band.bytes + by * size
      band.seconds[second] = (band.seconds[second] or 0) + by
    end
  end
  local by_field, ranks, entries, bytes = {}, {}, 0, 0
  for priority, band in pairs(bands) do
    entries, bytes = entries + band.entries, bytes + band.bytes
    by_field[priority .. ' entries'], by_field[priority .. ' bytes'] = band.entries, band.bytes
    for second, count in pairs(band.seconds) do
      local field = priority .. '/' .. second
      by_field[field], ranks[field] = count, (1000 - priority) * SPAN + 1000 * second
    end
  end
  by_field.entries, by_field.bytes = entries, bytes
  return by_field, ranks
end

-- Writes the counts. What came and went within one script costs nothing.
local function keep_counts()
  local by_field, ranks = changes()
  local fields = {'cursor', 'last'}
  for field, change in pairs(by_field) do
    if change ~= 0 then fields[#fields + 1] = field end
  end
  if #fields == 2 then return end
  local values, set, gone = redis.call('HMGET', backlog, unpack(fields)), {}, {}
  if values[1] then by_field, ranks = changes(values[1], values[2]) end
  for i = 3, #fields do
    local field, value = fields[i], tonumber(values[i] or 0) or 0
    local now = value + (by_field[field] or 0)
    if now > 0 then
      set[#set + 1], set[#set + 2] = field, now
      if ranks[field] and value <= 0 then redis.call('ZADD', ages, number(ranks[field]), field) end
    elseif values[i] then
      gone[#gone + 1] = field
      if ranks[field] then redis.call('ZREM', ages, field) end
    end
  end
  if #set > 0 then redis.call('HSET', backlog, unpack(set)) end
  if #gone > 0 then redis.call('HDEL', backlog, unpack(gone)) end
  moves = {}
end
