-- After lanes.lua. The three last of KEYS: load, workers, backlog.
local load, workers = KEYS[#KEYS - 2], KEYS[#KEYS - 1]
local LAPSE = 5000  -- ms: for so long it is good what a worker said
local MOST_WORKERS = 500  -- that one look asks
local now = clock()

-- A mean of those values that are known.
local function note(mean, value)
  if value > 0 then mean.sum, mean.count = mean.sum + value, mean.count + 1 end
end

local function value_of(mean) return mean.count > 0 and mean.sum / mean.count or nil end

-- Of the workers that serve: how many, how many requests they run at once, and means of the tokens per second of one, of the
-- tokens of a reply and of the bytes per token. Of many workers some are asked for all.
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
    elseif room > 0 then  -- one that drains has none for anybody
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

-- How many consumers the group has, and how many entries are pending; nil where there is no group.
local function group_size()
  local groups = redis.pcall('XINFO', 'GROUPS', requests)
  for _, each in ipairs(groups.err and {} or groups) do
    local of = {}
    for i = 1, #each, 2 do of[each[i]] = each[i + 1] end
    if of.name == group then return of.consumers, of.pending end
  end
end

-- Entries that nobody has, those of them that have a place, those that workers have, those of the first that were given
-- back, and the largest id that anybody has.
--
-- The server counts by consumer. Where these are many it is asked now and then, and our own counts, if there are such, are
-- good in between.
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
