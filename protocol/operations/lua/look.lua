-- Reads the state of a queue for operators, in one look that reads no request. Its cost grows with the number of workers,
-- not with what waits.
--
-- KEYS: requests, reports, digests, card, load, bands, dead, malformed; then prefixes without a name: report, heartbeat,
-- drain, band, lane. ARGV: group, waiting, unowned, numbers of bands, of tenants in each, and of letters.
-- Loaded after shared/clock.lua and shared/ranks.lua.
local requests, reports, digests, card, load, bands, dead, malformed = unpack(KEYS, 1, 8)
local report_of, heartbeat_of, drain_of, band_of, lane_of = unpack(KEYS, 9, 13)
local group, waiting, unowned = unpack(ARGV, 1, 3)
local most_bands, most_tenants, most_letters = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

-- Missing keys and values of another type count as empty.
local function ask(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  local why = answer.err
  if string.find(why, 'NOGROUP', 1, true) or string.find(why, 'no such key', 1, true) or string.find(why, 'WRONGTYPE', 1, true)
  then return {} end
  return redis.call(...)  -- ends the script with it
end

local function text(...)
  local answer = ask(...)
  return type(answer) == 'string' and answer or false
end

local function count(...)
  local answer = ask(...)
  return type(answer) == 'number' and answer or 0
end

local function named(flat)
  local of = {}
  for i = 1, #flat, 2 do of[flat[i]] = flat[i + 1] end
  return of
end

local now = clock()

local last_read = false
for _, each in ipairs(ask('XINFO', 'GROUPS', requests)) do
  local of = named(each)
  if of.name == group then last_read = of['last-delivered-id'] end
end

local function oldest_of(consumer)
  local first = ask('XPENDING', requests, group, '-', '+', 1, consumer)[1]
  return first and first[1] or false
end

local names, taken, listed = {}, {}, named(ask('ZRANGE', reports, 0, -1, 'WITHSCORES'))
for _, each in ipairs(ask('XINFO', 'CONSUMERS', requests, group)) do
  local of = named(each)
  taken[of.name], names[#names + 1] = of.pending, of.name
end
for name in pairs(listed) do
  if not taken[name] then names[#names + 1] = name end
end
local model_of, workers = named(ask('HGETALL', digests)), {}
for i, name in ipairs(names) do
  local heartbeat = heartbeat_of .. name
  local instance = text('GET', heartbeat)
  workers[i] = {
    name, taken[name] or -1, listed[name] or false, text('GET', report_of .. name), count('PTTL', heartbeat), instance,
    text('GET', drain_of .. name), model_of[name] or false,
  }
end

local function lane_of_priority(priority)
  local tenants, band = {}, band_of .. priority
  local from, to = rank_of(priority, 0), '(' .. rank_of(priority - 1, 0)
  local counters = ask('ZRANGE', band, 0, most_tenants - 1, 'WITHSCORES')
  for i = 1, #counters, 2 do
    tenants[#tenants + 1] = {counters[i], counters[i + 1], count('ZCOUNT', lane_of .. counters[i], from, to)}
  end
  return {priority, count('ZCARD', band), tenants}
end

local lanes = {}
for _, priority in ipairs(ask('ZRANGE', bands, 0, most_bands - 1, 'REV')) do
  if string.find(priority, '^%-?%d+$') then lanes[#lanes + 1] = lane_of_priority(priority) end
end

local letters = {}
for _, letter in ipairs(ask('XREVRANGE', dead, '+', '-', 'COUNT', most_letters)) do
  local of = named(letter[2])
  letters[#letters + 1] = {letter[1], of.id or '', of.code or '', of.worker or '', of.crashes or ''}
end

return {
  now, count('XLEN', requests), last_read, oldest_of(waiting), oldest_of(unowned),
  workers, ask('HGETALL', load), ask('HGETALL', card), lanes, count('XLEN', dead), count('XLEN', malformed), letters,
}
