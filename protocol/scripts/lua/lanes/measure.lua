-- Writes the state of the queue to `load`, once a second; the worker that comes first does it for all. It walks no lane, and reads
-- no more than one body unless it has to count anew. It also forgets what is of no use any more.
--
-- KEYS: as in fleet.lua.
-- ARGV: 1 to 5 as in sized.lua; 6: how many ms must have passed since the last measurement; 7: within how many seconds waiting
-- requests should begin.
-- Answers how many requests wait.
-- Loaded after lanes/fleet.lua and lanes/recount.lua.
local every, target = tonumber(ARGV[6]), tonumber(ARGV[7])
local KEPT = 3600000  -- ms that the figures outlast the workers
local MOST_BANDS, MOST_TENANTS = 64, 16  -- bands that are told apart; tenants of a band among which the oldest entry is searched

local before = redis.call('HMGET', load, 'at_ms', 'waiting', 'worker_rate', 'reply_tokens', 'token_bytes')
local since = now - (tonumber(before[1] or 0) or 0)
if since >= 0 and since < every then return tonumber(before[2] or 0) or 0 end

-- Returns tenants of a band, those that were served most, and some of higher bands that may have lower entries behind.
local function tenants_below(priority, above)
  local tenants = redis.call('ZRANGE', band_of .. priority, 0, MOST_TENANTS - 1, 'REV')
  for i = 1, math.min(#above, 2 * MOST_TENANTS - #tenants) do tenants[#tenants + 1] = above[i] end
  return tenants
end

-- Returns how long (ms) the oldest of these tenants' next entries with this priority has waited. No other waits longer, as far as
-- entries are due in their turn.
local function ms_waited(priority, tenants)
  local longest, from, to = 0, rank_of(priority, 0), '(' .. rank_of(priority - 1, 0)
  for _, tenant in ipairs(tenants) do
    local first = redis.call('ZRANGEBYSCORE', lane_of .. tenant, from, to, 'LIMIT', 0, 1)[1]
    if first then longest = math.max(longest, ms_since((entry_of(first)))) end
  end
  return longest
end

-- Describes each priority, the highest first: its entries, their tokens, and how long the oldest has waited.
local function told(bands, oldest, tokens_per_byte, reply)
  local priorities, texts = {}, {}
  for priority, band in pairs(bands) do
    if band.entries > 0 then priorities[#priorities + 1] = priority end
  end
  table.sort(priorities, function(one, other) return one > other end)
  local of_oldest, tenants = oldest and priority_of_oldest(oldest), {}
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

-- Returns how many workers would hold what runs, and begin what waits within the target. Until something is known of their speed,
-- it returns how many there are.
local function wanted(waiting, tokens, running, count, places, each_rate)
  if waiting + running == 0 then return 0 end
  local busy = places > 0 and running / (places / count) or 1
  if waiting > 0 then
    busy = each_rate and busy + tokens / (each_rate * target) or math.max(busy, count)
  end
  return math.max(1, math.min(math.ceil(busy), waiting + running))
end

local KNOWN, KNOWN_IDLE = 100000, 100  -- idle tenants that are remembered while others wait, and while none does
local FORGOTTEN = 10000  -- tenants that one measurement forgets at most
local CHECKED = 100  -- names that one measurement checks

-- Forgets idle tenants, those that were served least first. A forgotten tenant comes back as if it had been served as much as the
-- last one to leave, which is no less than it was.
local function forget_tenants(waiting)
  local count = math.min(FORGOTTEN, redis.call('ZCARD', service) - (waiting > 0 and KNOWN or KNOWN_IDLE))
  if count <= 0 then return end
  local most = tonumber(redis.call('ZRANGE', service, count - 1, count - 1, 'WITHSCORES')[2])
  redis.call('HSET', weights, FLOOR, number(math.max(floor(), most)))
  redis.call('ZREMRANGEBYRANK', service, 0, count - 1)
end

-- Forgets names of entries that somebody deleted, or that workers from before lanes took. In the end no more names are left than
-- entries wait.
local function forget_names(waiting)
  if redis.call('HLEN', named) <= waiting then return end
  local some, gone = redis.call('HRANDFIELD', named, CHECKED, 'WITHVALUES'), {}
  for i = 1, #some, 2 do
    if not is_held(holder_of(some[i + 1])) then gone[#gone + 1] = some[i] end
  end
  if #gone > 0 then redis.call('HDEL', named, unpack(gone)) end
end

local function rounded(value) return string.format('%.6g', value) end

local num_workers, places, rate, reply, size = fleet()
rate = rate or tonumber(before[3] or 0) or 0
reply, size = reply or tonumber(before[4] or 0) or 0, size or tonumber(before[5] or '') or BYTES_PER_TOKEN
local bands, entries = counts()
local cursor = redis.call('HMGET', backlog, 'cursor', 'last')
local waiting, placed, running, given_back, last = standing(not cursor[1] and entries or nil)
bands, entries = counted(placed, last, cursor, bands, entries)
forget_tenants(placed)
forget_names(placed + given_back)
local total = 0
for _, band in pairs(bands) do total = total + math.max(0, band.bytes) end
local mean = entries > 0 and total / entries or 0
local tokens = math.ceil(waiting * (mean / size + reply))
local oldest = oldest_of(WAITING)
redis.call('HSET', load, 'at_ms', now, 'waiting', waiting, 'waiting_tokens', tokens,
  'oldest_ms', math.max(ms_since(oldest), ms_since(oldest_of(UNOWNED))), 'bands', told(bands, oldest, 1 / size, reply),
  'running', running, 'given_back', given_back, 'workers', num_workers, 'slots', rounded(places), 'rate', rounded(num_workers * rate),
  'worker_rate', rounded(rate), 'reply_tokens', rounded(reply), 'token_bytes', rounded(size),
  'wanted_workers', wanted(waiting, tokens, running, num_workers, places, rate > 0 and rate))
redis.call('PEXPIRE', load, KEPT)
redis.call('PEXPIRE', workers, KEPT)
return waiting
