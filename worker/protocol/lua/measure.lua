-- After lanes.lua. The four last of KEYS: load, workers, and those of backlog.lua. ARGV from 6 on: what this worker says of
-- itself (requests at once, tokens per second or 0, tokens of a reply and bytes per token or 0), and in how many seconds what
-- waits is to have begun. Answers how many requests wait.
--
-- Each worker says its part; whoever comes first in a second writes down how the queue stands. It walks no lane.
local load, workers = KEYS[#KEYS - 3], KEYS[#KEYS - 2]
local slots, rate, reply_tokens, token_bytes, target = unpack(ARGV, 6, 10)
local EVERY, LAPSE, KEPT = 1000, 5000, 3600000  -- ms: between two looks; what a part, and what the numbers are good for
local UNOWNED = 'unowned'  -- holds what was given back; what follows a slash there, is set aside for a model
local MOST_BANDS = 64  -- what waits below them is in the sums alone
local RECOUNTED = 1000  -- entries that one look counts
local now = clock()

local function hash_of(answer, key)
  if type(answer) ~= 'table' or not answer.err then return answer end
  redis.call('DEL', key)  -- somebody wrote something else there
  return {}
end

-- Of the workers that serve: how many, what they can do, and what their requests are like.
local function fleet()
  local count, places, sum, rated, replies, replied, sizes, sized = 0, 0, 0, 0, 0, 0, 0, 0
  local parts, gone = hash_of(redis.pcall('HGETALL', workers), workers), {}
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
    if #gone >= 1000 then break end
  end
  if #gone > 0 then redis.call('HDEL', workers, unpack(gone)) end
  return count, places, rated > 0 and sum / rated, replied > 0 and replies / replied, sized > 0 and sizes / sized
end

-- Entries that nobody has, those of them that have a place, those that workers have, and the largest id that anybody has.
local function standing()
  local pending = redis.pcall('XPENDING', requests, group)
  local length = redis.call('XLEN', requests)
  if pending.err then return length, 0, 0 end  -- the group is not there
  local placed, held = 0, 0
  for _, each in ipairs(pending[4] or {}) do
    if each[1] == WAITING then placed = tonumber(each[2]) end
    if each[1] == WAITING or string.match(each[1], '^[^/]*') == UNOWNED then held = held + tonumber(each[2]) end
  end
  local running = pending[1] - held
  return math.max(0, length - running), placed, running, pending[3]
end

local function rounded(value) return string.format('%.6g', value) end

local function ms_waited(consumer)
  local first = redis.pcall('XPENDING', requests, group, '-', '+', 1, consumer)[1]
  return first and math.max(0, now - string.match(first[1], '^%d+')) or 0
end

-- Counts a page of what waits, from where the last one ended.
local function recount(cursor, last)
  local page = redis.call('XPENDING', requests, group, '(' .. cursor, '+', RECOUNTED, WAITING)
  local read, is_done = 0, #page < RECOUNTED
  for _, item in ipairs(page) do
    local entry = item[1]
    if is_after(entry, last) then  -- it came since, and was counted then
      is_done = true
      break
    end
    local found = redis.call('XRANGE', requests, entry, entry)[1]
    local fields = found and found[2] or {}
    local _, rank = place(entry, fields)
    local size = size_of(fields)
    cursor, read = entry, read + size
    count_in(entry, priority_of(rank), size)
    if read >= most then
      is_done = false
      break
    end
  end
  redis.call('HSET', backlog, 'cursor', cursor)
  keep_counts()
  if is_done then redis.call('HDEL', backlog, 'cursor', 'last') end
end

-- Entries and bytes of what has a place, as far as they are counted. Where the counts are not of what waits (somebody deleted
-- some, or a worker from before lanes took some), they are made anew.
local function counted(placed, largest)
  if placed == 0 then
    redis.call('DEL', backlog, ages)
    return 0, 0
  end
  local is_whole = redis.call('EXISTS', ages) == 1
  local values = redis.call('HMGET', backlog, 'entries', 'cursor', 'last')
  if not values[2] and (not is_whole or tonumber(values[1]) ~= placed) then
    redis.call('DEL', backlog, ages)
    values[2], values[3] = '0-0', largest
    redis.call('HSET', backlog, 'cursor', values[2], 'last', values[3])
  end
  if values[2] then recount(values[2], values[3]) end
  values = redis.call('HMGET', backlog, 'entries', 'bytes')
  return tonumber(values[1] or 0), tonumber(values[2] or 0)
end

-- Of each priority, the highest first: entries, tokens, and for how long (ms) the oldest has waited, to the second.
local function bands_of(entries, oldest, tokens_per_byte, reply)
  local bands, from, seen, is_whole = {}, '-inf', 0, false
  while #bands < MOST_BANDS do
    local first = redis.call('ZRANGEBYSCORE', ages, from, '+inf', 'LIMIT', 0, 1)[1]
    local priority, second = string.match(first or '', '^(%-?%d+)/(%d+)$')
    if not priority then
      is_whole = true
      break
    end
    local count, bytes = unpack(redis.call('HMGET', backlog, priority .. ' entries', priority .. ' bytes'))
    count, bytes = tonumber(count or 0), tonumber(bytes or 0)
    local waited = math.max(0, math.min(oldest, now - 1000 * second))
    local tokens = math.ceil(bytes * tokens_per_byte + count * reply)
    bands[#bands + 1] = string.format('%s:%.0f:%.0f:%.0f', priority, count, tokens, waited)
    seen, from = seen + count, number((1001 - priority) * SPAN)
  end
  if is_whole and seen ~= entries then redis.call('HDEL', backlog, 'entries') end  -- the next look counts anew
  return table.concat(bands, ' ')
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

local part = string.format('%d %s %s %s %s', now, slots, rate, reply_tokens, token_bytes)
hash_of(redis.pcall('HSET', workers, worker, part), workers)
local names = {'at_ms', 'waiting', 'worker_rate', 'reply_tokens', 'token_bytes'}
local before = hash_of(redis.pcall('HMGET', load, unpack(names)), load)
local since = now - (tonumber(before[1] or 0) or 0)
if since >= 0 and since < EVERY then return tonumber(before[2] or 0) end

local count, places, each_rate, reply, size = fleet()
local waiting, placed, running, largest = standing()
local entries, bytes = counted(placed, largest)
each_rate = each_rate or tonumber(before[3] or '')
each_rate = each_rate and each_rate > 0 and each_rate
reply, size = reply or tonumber(before[4] or 0) or 0, size or tonumber(before[5] or '') or BYTES_PER_TOKEN
local mean = entries > 0 and bytes / entries or 0
local tokens = math.ceil(waiting * (mean / size + reply))
local oldest = math.max(ms_waited(WAITING), ms_waited(UNOWNED))
local bands = bands_of(entries, oldest, 1 / size, reply)
local numbers = {
  'at_ms', now, 'waiting', waiting, 'waiting_tokens', tokens, 'oldest_ms', oldest, 'bands', bands, 'running', running,
  'workers', count, 'slots', rounded(places), 'rate', rounded(count * (each_rate or 0)),
  'wanted_workers', wanted(waiting, tokens, running, count, places, each_rate), 'worker_rate', rounded(each_rate or 0),
  'reply_tokens', rounded(reply), 'token_bytes', rounded(size),
}
redis.call('HSET', load, unpack(numbers))
redis.call('PEXPIRE', load, KEPT)
redis.call('PEXPIRE', workers, KEPT)
return waiting
