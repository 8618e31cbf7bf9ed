-- After clock.lua, sized.lua, accounts.lua and backlog.lua.
--
-- What is pending for WAITING waits, whether or not it has a place in a lane: lanes only say who is next. So an entry of a
-- lane is taken only if it is pending there, and what no lane has is found by its age. It is pending there since 1970:
-- that tells it, within one XCLAIM, from one that a worker has.
local WAITING = 'waiting'
local SINCE, LONG = 1, 10 ^ 12  -- ms: when the former were delivered, and what no worker has had an entry for
local PATIENCE = 60000  -- ms: when one without a deadline is due, beside those of its tenant that have one
local BYTES_PER_TOKEN = 4  -- of a prompt that is not tokenized yet

local function whole(text, least, most)
  local number = string.match(text, '^%s*[-+]?%d+%s*$') and tonumber(text)
  return number and number >= least and number <= most and number or nil
end

local function tokens_of(size) return math.ceil(size / BYTES_PER_TOKEN) end

-- Tenant, rank in its lane and, if it expires, when (ms). What is no such value is refused when the entry is claimed.
local function place(entry, fields)
  local tenant, priority, timeout = '', 0, nil
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if name == 'tenant' then
      tenant = #value <= 128 and string.match(value, '^[%w_.:-]+$') or ''
    elseif name == 'priority' then
      priority = whole(value, -1000, 1000) or 0
    elseif name == 'timeout_s' then
      local seconds = tonumber(value)
      timeout = seconds and seconds > 0 and seconds <= 604800 and 1000 * seconds or nil
    end
  end
  local since = math.min(tonumber(string.match(entry, '^%d+')), SPAN / 2)
  local before = math.floor(since + (timeout or PATIENCE))
  return tenant, (1000 - priority) * SPAN + before, timeout and string.format('%.0f', since + timeout) or nil
end

-- Members of lanes sort as their entries came in, where ranks are equal: a longer number follows a shorter one. They have
-- the entry's size: what would be read is known before it is.
local function member(entry, size)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  return string.format('%c%s-%s/%d', 64 + #number, number, ms, size)
end

local function entry_of(member)
  local number, ms, size = string.match(member, '^.(%d+)-(%d+)/(%d+)$')
  return ms .. '-' .. number, tonumber(size)
end

-- The least that anybody who waits with this priority has been served; nil if nobody does.
local function least(priority)
  return tonumber(redis.call('ZRANGE', band_of .. priority, 0, 0, 'WITHSCORES')[2])
end

-- Whoever comes back has been served no less than those that stayed: what it did not ask for it cannot claim now. So
-- nothing need be known of those who had less, once nobody waits who had less than they.
local function lifted(tenant, priority)
  local had = tonumber(redis.call('ZSCORE', service, tenant) or 0)
  redis.call('ZREM', service, tenant)
  local active = redis.call('ZRANGE', bands, 0, 16)
  if #active <= 16 then
    local lowest = floor()
    for _, each in ipairs(active) do lowest = math.min(lowest, least(each) or lowest) end
    redis.call('ZREMRANGEBYSCORE', service, '-inf', '(' .. number(lowest))
  end
  return math.max(had, least(priority) or floor())
end

-- A tenant's counter is in the band of its next entry while it waits, and in `service` while it does not.
local function seat(tenant, before, now, counter)
  if before == now then return end
  if before then
    counter = counter or tonumber(redis.call('ZSCORE', band_of .. before, tenant) or floor())
    redis.call('ZREM', band_of .. before, tenant)
    if redis.call('EXISTS', band_of .. before) == 0 then redis.call('ZREM', bands, before) end
  end
  if now then
    redis.call('ZADD', band_of .. now, number(counter or lifted(tenant, now)), tenant)
    redis.call('ZADD', bands, now, now)
  else
    redis.call('ZADD', service, number(counter), tenant)
    redis.call('HSET', weights, FLOOR, number(math.max(floor(), counter)))
  end
end

-- New entries, up to `limit` of them: each gets its place. Answers whether there may be more. They are read one by one, as
-- nobody knows how large they are.
local function lane_new(limit)
  local ids, newcomers, best, expiring, read, has_more = {}, {}, {}, {}, 0, true
  while #ids < limit and read < most do
    local answer = redis.call('XREADGROUP', 'GROUP', group, WAITING, 'COUNT', 1, 'STREAMS', requests, '>')
    if not answer then
      has_more = false
      break
    end
    local entry, fields = unpack(answer[1][2][1])
    local tenant, rank, expires = place(entry, fields)
    local size, ranked = size_of(fields), newcomers[tenant] or {}
    ranked[#ranked + 1], ranked[#ranked + 2] = string.format('%.0f', rank), member(entry, size)
    newcomers[tenant], best[tenant] = ranked, math.min(best[tenant] or rank, rank)
    tally(priority_of(rank), 1, size)
    if expires then expiring[#expiring + 1], expiring[#expiring + 2] = expires, entry end
    ids[#ids + 1], read = entry, read + size
  end
  if #ids == 0 then return has_more end
  ids[#ids + 1], ids[#ids + 2], ids[#ids + 3] = 'TIME', SINCE, 'JUSTID'
  redis.call('XCLAIM', requests, group, WAITING, 0, unpack(ids))
  if #expiring > 0 then redis.call('ZADD', due, unpack(expiring)) end
  for tenant, ranked in pairs(newcomers) do
    local before, priority = priority_next(tenant), priority_of(best[tenant])
    redis.call('ZADD', lane_of .. tenant, unpack(ranked))
    if not before or priority > before then seat(tenant, before, priority) end
  end
  return has_more
end

-- Gives entries to this worker if they wait; answers those that do.
local function claim(ids) return redis.call('XCLAIM', requests, group, worker, string.format('%.0f', LONG), unpack(ids)) end

-- Notes that an entry that waited, wherever its place is, is this worker's now. Answers whether there is room for more.
local function take_out(entry, fields)
  local tenant, rank = place(entry, fields)
  local size, before = size_of(fields), priority_next(tenant)
  tally(priority_of(rank), -1, -size)
  redis.call('ZREM', lane_of .. tenant, member(entry, size))
  seat(tenant, before, priority_next(tenant))
  if redis.call('HSETNX', charged, entry, tokens_of(size)) == 1 then serve(tenant, tokens_of(size)) end
  redis.call('ZREM', due, entry)
  return add(entry, fields)
end
