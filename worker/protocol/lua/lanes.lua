-- After clock.lua, sized.lua, accounts.lua and backlog.lua. KEYS[9]: passed.
--
-- What is pending for WAITING waits, whether or not it has a place in a lane: lanes only say who is next. So an entry of a
-- lane is taken only if it is pending there, and what no lane has is found by its age. It is pending there since 1970:
-- that tells it, within one XCLAIM, from one that a worker has, whatever the server's clock says.
local passed = KEYS[9]
local WAITING = 'waiting'
local SINCE, LEAST = 1, 3600000  -- ms: when the former were delivered, and before when nothing was to a worker
local PATIENCE = 60000  -- ms: when one without a deadline is due, beside those of its tenant that have one
local BYTES_PER_TOKEN = 4  -- of a prompt that is not tokenized yet
local BEGINNING = 1000  -- bytes of a prompt: those that begin alike go where that is known
local SLOTS = 1024  -- of `homes`
local SMALL, AT_A_TIME = 16384, 4  -- bytes of entries after which several are read at a time

local function whole(text, least, most)
  local number = string.match(text, '^%s*[-+]?%d+%s*$') and tonumber(text)
  return number and number >= least and number <= most and number or nil
end

local function tokens_of(size) return math.ceil(size / BYTES_PER_TOKEN) end

local function name_of(value) return #value <= 128 and string.match(value, '^[%w_.:-]+$') or '' end

local function slot_of(text) return tonumber(string.sub(redis.sha1hex(text), 1, 8), 16) % SLOTS end

-- Where an entry belongs: its tenant, its member in that lane and its rank there; if it expires, when (ms); its priority,
-- its size, and its slot of `homes`, if it has one. What is no such value is refused when the entry is claimed.
--
-- Members sort as their entries came in, where ranks are equal: a longer number follows a shorter one. They have the size:
-- what would be read is known before it is.
local function place(entry, fields)
  local tenant, priority, timeout, slot, size = '', 0, nil, nil, 0
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    size = size + #name + #value
    if name == 'tenant' then
      tenant = name_of(value)
    elseif name == 'priority' then
      priority = whole(value, -1000, 1000) or 0
    elseif name == 'timeout_s' then
      local seconds = tonumber(value)
      timeout = seconds and seconds > 0 and seconds <= 604800 and 1000 * seconds or nil
    elseif name == 'affinity' then
      slot = name_of(value) ~= '' and slot_of(value) or slot
    elseif #value >= BEGINNING and (name == 'prompt' or name == 'messages') then
      slot = slot or slot_of(string.sub(value, 1, BEGINNING))
    end
  end
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  local since = math.min(tonumber(ms), SPAN / 2)
  local before = math.floor(since + (timeout or PATIENCE))
  return {
    tenant = tenant, priority = priority, size = size, slot = slot,
    rank = string.format('%.0f', (1000 - priority) * SPAN + before),
    expires = timeout and string.format('%.0f', math.min(since, clock()) + timeout),  -- ids of old count on where it was set back
    member = string.format('%c%s-%s/%d/%s', 64 + #number, number, ms, size, slot or ''),
  }
end

local function entry_of(member)
  local number, ms, size, slot = string.match(member, '^.(%d+)-(%d+)/(%d+)/(%d*)$')
  return ms .. '-' .. number, tonumber(size), slot
end

-- Whoever comes back has been served no less than those that stayed, but for CREDIT: what it did not ask for it cannot claim
-- now. A lane is empty now and then though its tenant asks for more than it gets: the credit is for that. So nothing need be
-- known of those who had less, once nobody waits who had less than they.
local function lifted(tenant, priority)
  local had = tonumber(redis.call('ZSCORE', service, tenant) or 0)
  redis.call('ZREM', service, tenant)
  local lowest, is_known = least_of_all()
  if is_known then redis.call('ZREMRANGEBYSCORE', service, '-inf', '(' .. number(base(lowest))) end
  return math.max(had, base(least(priority) or lowest))
end

-- A tenant's counter is in the band of its next entry while it waits, and in `service` while it does not.
local function seat(tenant, before, now, counter)
  if before == now then return end
  if before then
    counter = counter or tonumber(redis.call('ZSCORE', band_of .. before, tenant) or floor())
    redis.call('ZREM', band_of .. before, tenant)
    if redis.call('EXISTS', band_of .. before) == 0 then redis.call('ZREM', bands, before) end
    if now and now > before then counter = math.max(counter, (least(now) or counter) - CREDIT) end
  end
  if now then
    redis.call('ZADD', band_of .. now, number(counter or lifted(tenant, now)), tenant)
    redis.call('ZADD', bands, now, now)
  else
    redis.call('ZADD', service, number(counter), tenant)
    redis.call('HSET', weights, FLOOR, number(math.max(floor(), counter)))
  end
end

-- Lets entries wait that have their places: of each tenant, in the order they came, its name, ranks and members, and its
-- highest priority.
local function line_up(newcomers)
  for _, each in ipairs(newcomers) do
    local tenant, priority = each.name, each.priority
    local before = priority_next(tenant)
    redis.call('ZADD', lane_of .. tenant, unpack(each.ranked))
    if not before or priority > before then seat(tenant, before, priority) end
  end
end

-- New entries, up to `limit` of them or a few more: each gets its place. Answers whether there may be more. They are read a
-- few at a time, as nobody knows how large they are.
local function lane_new(limit)
  local ids, newcomers, of, expiring, read, last, has_more = {}, {}, {}, {}, 0, SMALL + 1, true
  while #ids < limit and read < most do
    local many = last <= SMALL and AT_A_TIME or 1
    local answer = redis.call('XREADGROUP', 'GROUP', group, WAITING, 'COUNT', many, 'STREAMS', requests, '>')
    if not answer then
      has_more = false
      break
    end
    last = 0
    for _, item in ipairs(answer[1][2]) do
      local found = place(item[1], item[2])
      local each = of[found.tenant]
      if not each then
        each = {name = found.tenant, priority = found.priority, ranked = {}}
        of[found.tenant], newcomers[#newcomers + 1] = each, each
      end
      each.ranked[#each.ranked + 1], each.ranked[#each.ranked + 2] = found.rank, found.member
      each.priority = math.max(each.priority, found.priority)
      tally(found.priority, 1, found.size)
      if found.expires then expiring[#expiring + 1], expiring[#expiring + 2] = found.expires, item[1] end
      ids[#ids + 1], last = item[1], last + found.size
    end
    read = read + last
  end
  if #ids == 0 then return has_more end
  ids[#ids + 1], ids[#ids + 2], ids[#ids + 3] = 'TIME', SINCE, 'JUSTID'
  redis.call('XCLAIM', requests, group, WAITING, 0, unpack(ids))
  if #expiring > 0 then redis.call('ZADD', due, unpack(expiring)) end
  line_up(newcomers)
  return has_more
end

-- Gives entries to this worker if they wait; answers those that do.
local function claim(ids)
  return redis.call('XCLAIM', requests, group, worker, string.format('%.0f', math.max(1, clock() - LEAST)), unpack(ids))
end

-- Notes that an entry that waited, wherever its place is, is this worker's now. Answers whether there is room for more.
local function take_out(entry, fields)
  local was = place(entry, fields)
  tally(was.priority, -1, -was.size)
  local before = priority_next(was.tenant)
  redis.call('ZREM', lane_of .. was.tenant, was.member)
  seat(was.tenant, before, priority_next(was.tenant))
  local cost = tokens_of(was.size)
  if redis.call('HSETNX', charged, entry, cost) == 1 then serve(was.tenant, cost) end
  redis.call('ZREM', due, entry)
  if was.slot then redis.call('ZREM', passed, entry) end
  return add(entry, fields)
end

-- Lets an entry wait again that somebody has. It keeps its rank, and what it was charged.
local function put_back(entry, found)
  redis.call('XCLAIM', requests, group, WAITING, 0, entry, 'TIME', SINCE, 'JUSTID')
  if found.expires then redis.call('ZADD', due, found.expires, entry) end
  tally(found.priority, 1, found.size)
  line_up({{name = found.tenant, priority = found.priority, ranked = {found.rank, found.member}}})
end
