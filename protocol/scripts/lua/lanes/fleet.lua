-- Sums up what the workers of a queue can do, and counts the entries of the queue.
--
-- KEYS: those of lanes.lua; the last three are load, workers and backlog.
-- Loaded after shared/clock.lua and lanes/lanes.lua.
local load, workers = KEYS[#KEYS - 2], KEYS[#KEYS - 1]
local LAPSE = 5000  -- ms for which the last word of a worker counts
local MOST_WORKERS = 500  -- workers that one measurement asks
local now = clock()

-- Adds a value to a mean, if it is known.
local function note(mean, value)
  if value > 0 then mean.sum, mean.count = mean.sum + value, mean.count + 1 end
end

local function value_of(mean) return mean.count > 0 and mean.sum / mean.count or nil end

-- Returns how many workers serve, how many requests they run at once, and three means: tokens per second of one worker, tokens of
-- a reply, and bytes per token. In a large fleet it asks some workers, which stand for all.
local function fleet()
  local count, places = 0, 0
  local rates, replies, sizes = {sum = 0, count = 0}, {sum = 0, count = 0}, {sum = 0, count = 0}
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
    if not (room and speed and tokens and size) or math.abs(now - tonumber(at)) > LAPSE then
      gone[#gone + 1] = parts[i]
    elseif room > 0 then  -- a worker that drains takes nothing
      count, places = count + 1, places + room
      note(rates, speed)
      note(replies, tokens)
      note(sizes, size)
    end
  end
  if #gone > 0 then redis.call('HDEL', workers, unpack(gone)) end
  local each = math.max(1, all / MOST_WORKERS)
  return math.floor(count * each + 0.5), places * each, value_of(rates), value_of(replies), value_of(sizes)
end

-- Returns how many consumers the group has and how many entries are pending, or nil if there is no group.
local function group_size()
  local groups = redis.pcall('XINFO', 'GROUPS', requests)
  for _, each in ipairs(groups.err and {} or groups) do
    local of = {}
    for i = 1, #each, 2 do of[each[i]] = each[i + 1] end
    if of.name == group then return of.consumers, of.pending end
  end
end

-- Returns how many entries no worker has, how many of them have a place, how many entries workers have, how many of the first
-- were given back, and the largest id that is pending.
--
-- The server counts by consumer. If these are many, it is asked now and then, and our own counts, if there are any, hold in
-- between.
local function standing(entries)
  local length, consumers, all = redis.call('XLEN', requests), group_size()
  if not consumers then return length, 0, 0, 0 end
  if entries and consumers > MOST_WORKERS and now % math.ceil(consumers / MOST_WORKERS) > 0 then
    local given_back = #redis.call('XPENDING', requests, group, '-', '+', MOST_WORKERS, UNOWNED)
    local running = math.max(0, all - entries - given_back)
    return math.max(0, length - running), entries, running, given_back
  end
  local pending = redis.call('XPENDING', requests, group)
  local placed, given_back = 0, 0
  for _, each in ipairs(pending[4] or {}) do
    if each[1] == WAITING then placed = tonumber(each[2]) end
    if string.match(each[1], '^[^/]*') == UNOWNED then given_back = given_back + tonumber(each[2]) end
  end
  local running = pending[1] - placed - given_back
  return math.max(0, length - running), placed, running, given_back, pending[3]
end
