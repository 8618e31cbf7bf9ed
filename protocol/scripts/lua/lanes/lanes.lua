-- Says which waiting entry is next, and moves entries between lanes and workers. docs/lanes.md describes the keys.
--
-- An entry that is pending for WAITING waits, whether or not it has a place in a lane: lanes only say which one is next. So a
-- script takes an entry from a lane only if it is pending for WAITING, and finds an entry that no lane has by its age. The
-- delivery time of what is pending for WAITING is in 1970. Within one XCLAIM, that tells it from an entry that a worker has,
-- whatever the server's clock says.
--
-- A script reads a body when the entry gets its first place, and when a worker gets the entry; it reads it once if one run does
-- both. The place is kept with what the entry was charged, for the time when no worker has the entry any more.
--
-- KEYS: those of accounts.lua; from 9 on passed, named, asked, and the prefix of aside; the last one is backlog.
-- ARGV: 1 to 5 as in sized.lua.
-- Loaded after shared/clock.lua, shared/junk.lua, shared/sized.lua, lanes/accounts.lua and lanes/backlog.lua.
local passed, named, asked, aside_of = unpack(KEYS, 9, 12)
local WAITING, UNOWNED = 'waiting', 'unowned'
local ASIDE = UNOWNED .. '/'  -- a model's digest follows; only workers with that model continue such an entry
local SINCE, LEAST = 1, 3600000  -- ms: when entries of WAITING were delivered, and a time before which no worker's entry was
local PATIENCE = 60000  -- ms until an entry without a deadline is due, among entries of its tenant that have one
local LONGEST = 604800000  -- ms: the longest deadline
local AGAIN = 1.6 * 10 ^ 12  -- ms by which an entry that a worker has had is due earlier, so before all that none has had
local BYTES_PER_TOKEN = 4  -- an estimate for prompts that are not tokenized yet
local BEGINNING = 1000  -- bytes of a prompt: prompts that begin with the same ones have the same home
local SLOTS = 1024  -- fields that `homes` can have
local SMALL, AT_A_TIME = 16384, 4  -- a script reads several entries at a time after entries of so few bytes, and how many
local ACTS = 4  -- times that one cancellation can end a wait
local bodies, bytes_read = {}, 0  -- new entries that this run has read, by id; bytes that it has read of other entries
local newly = {}  -- entries that wait from this run on, and their places; this run may give out some of them

local function whole(text, least, most)
  local number = string.match(text, '^%s*[-+]?%d+%s*$') and tonumber(text)
  return number and number >= least and number <= most and number or nil
end

local function tokens_of(size) return math.ceil(size / BYTES_PER_TOKEN) end

local function name_of(value) return #value <= 128 and string.match(value, '^[%w_.:-]+$') or '' end

local function slot_of(text) return tonumber(string.sub(redis.sha1hex(text), 1, 8), 16) % SLOTS end

local function timeout_of(ms) return ms and ms > 0 and ms <= LONGEST and ms or nil end

-- Returns what an entry says about its place: tenant and priority; deadline (ms after it came), slot of `homes` and id, if they
-- are there; and size. It skips an invalid value, which is refused when the entry is claimed.
local function described(fields)
  local tenant, priority, timeout, slot, size, id = '', 0, nil, nil, 0, nil
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    size = size + #name + #value
    if name == 'id' then
      id = name_of(value)
    elseif name == 'tenant' then
      tenant = name_of(value)
    elseif name == 'priority' then
      priority = whole(value, LOWEST, HIGHEST) or 0
    elseif name == 'timeout_s' then
      timeout = timeout_of(1000 * (tonumber(value) or 0))
    elseif name == 'affinity' then
      slot = name_of(value) ~= '' and slot_of(value) or slot
    elseif #value >= BEGINNING and (name == 'prompt' or name == 'messages') then
      slot = slot or slot_of(string.sub(value, 1, BEGINNING))
    end
  end
  return {tenant = tenant, priority = priority, timeout = timeout, slot = slot, size = size, id = id ~= '' and id or nil}
end

-- `noted` writes that as `charged` keeps it, and `recalled` reads it back. `recalled` returns nil if no script has known the
-- place.
local function noted(was)
  return ' ' .. was.tenant .. '/' .. was.priority .. '/' .. (was.timeout or '') .. '/' .. was.size .. '/' .. (was.slot or '')
    .. '/' .. (was.id or '')
end

local function recalled(text)
  local pattern = ' ([^/]*)/(%-?%d+)/([^/]*)/(%d+)/(%d*)/([^/]*)$'
  local tenant, priority, timeout, size, slot, id = string.match(text or '', pattern)
  priority = whole(priority or '', LOWEST, HIGHEST)
  if not priority then return nil end
  return {
    tenant = name_of(tenant), priority = priority, timeout = timeout_of(tonumber(timeout)), size = tonumber(size),
    slot = tonumber(slot), id = name_of(id) ~= '' and id or nil,
  }
end

-- Adds to a place the member in the lane, its rank, when (ms) the entry is due, and when it expires, if it does.
--
-- Members of equal rank sort in the order in which their entries came in: a longer number follows a shorter one. A member states
-- the size, so a script knows how much it would read before it reads.
local function placed(entry, found)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  local since = math.min(tonumber(ms), SPAN / 2)
  found.before = math.floor(since + (found.timeout or PATIENCE))
  found.rank = rank_of(found.priority, found.before)
  found.expires = found.timeout and string.format('%.0f', since + found.timeout)
  found.member = string.format('%c%s-%s/%d/%s', 64 + #number, number, ms, found.size, found.slot or '')
  return found
end

local function place(entry, fields) return placed(entry, described(fields)) end

-- Returns the place of an entry from what `charged` has of it, or else from its body; nil if the entry was deleted.
local function place_known(entry, text)
  local found = recalled(text)
  if not found then
    local item = redis.call('XRANGE', requests, entry, entry)[1]
    if not item then return nil end
    found = described(item[2])
    bytes_read = bytes_read + found.size
  end
  return placed(entry, found)
end

local function entry_of(member)
  local number, ms, size, slot = string.match(member, '^.(%d+)-(%d+)/(%d+)/(%d*)$')
  return ms .. '-' .. number, tonumber(size), slot
end

-- Returns the counter of a tenant that comes back. It counts as served no less than the tenants that stayed, minus CREDIT: it
-- cannot claim now what it did not ask for. The credit is there because a lane is empty now and then though its tenant asks for
-- more than it gets. So the counters of tenants that were served less need not be kept, once every tenant that waits was served
-- more.
local function lifted(tenant, priority)
  local had = tonumber(redis.call('ZSCORE', service, tenant) or 0)
  redis.call('ZREM', service, tenant)
  local lowest, is_known = least_of_all()
  if is_known then redis.call('ZREMRANGEBYSCORE', service, '-inf', '(' .. number(base(lowest))) end
  return math.max(had, base(least(priority) or lowest))
end

-- Moves a tenant's counter. It is in the band of the tenant's next entry while the tenant waits, and in `service` while it does
-- not.
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

-- Notes that an entry waits.
local function note(entry, found) newly[#newly + 1], newly[#newly + 2] = entry, found end

-- Ends the wait of entries that somebody asked to cancel. A noted cancellation does not prove that the flag is set, which is in
-- another slot. So it acts a few times and no more; the fraction of its score counts them.
local function end_asked(waits, ids)
  for i, score in ipairs(redis.call('ZMSCORE', asked, unpack(ids))) do
    if score then
      redis.call('ZADD', due, 0, waits[i])
      if tonumber(score) % 1 < (ACTS - 1) / ACTS then
        redis.call('ZINCRBY', asked, 1 / ACTS, ids[i])
      else
        redis.call('ZREM', asked, ids[i])
      end
    end
  end
end

-- Writes what `note` has noted, except for entries that this run has given out.
local function keep_notes()
  local waits, ids, names, expiring = {}, {}, {}, {}
  for i = 1, #newly, 2 do
    local entry, found = newly[i], newly[i + 1]
    if not found.is_taken then
      waits[#waits + 1], ids[#ids + 1] = entry, found.id or entry
      if found.id then names[#names + 1], names[#names + 2] = found.id, entry end
      if found.expires then expiring[#expiring + 1], expiring[#expiring + 2] = found.expires, entry end
    end
  end
  if #waits == 0 then return end
  if #names > 0 then redis.call('HSET', named, unpack(names)) end
  if #expiring > 0 then redis.call('ZADD', due, unpack(expiring)) end
  if redis.call('EXISTS', asked) == 1 then end_asked(waits, ids) end
end

-- Adds entries to the lanes. For each tenant, in the order in which they came, `newcomers` has the name, the ranks and members,
-- and the highest priority.
local function line_up(newcomers)
  for _, each in ipairs(newcomers) do
    local tenant, priority = each.name, each.priority
    local before = priority_next(tenant)
    redis.call('ZADD', lane_of .. tenant, unpack(each.ranked))
    if not before or priority > before then seat(tenant, before, priority) end
  end
end

-- Gives up to `limit` new entries, or a few more, their places. Returns whether there may be more. It reads a few at a time,
-- because it cannot know how large they are.
local function lane_new(limit)
  local new, newcomers, of, read, last, has_more = {}, {}, {}, 0, SMALL + 1, true
  while #new < limit and read < most do
    local many = last <= SMALL and AT_A_TIME or 1
    local answer = redis.call('XREADGROUP', 'GROUP', group, WAITING, 'COUNT', many, 'STREAMS', requests, '>')
    if not answer then
      has_more = false
      break
    end
    last = 0
    for _, item in ipairs(answer[1][2]) do
      local found = place(item[1], item[2])
      found.fields, bodies[item[1]] = item[2], found
      local each = of[found.tenant]
      if not each then
        each = {name = found.tenant, priority = found.priority, ranked = {}}
        of[found.tenant], newcomers[#newcomers + 1] = each, each
      end
      each.ranked[#each.ranked + 1], each.ranked[#each.ranked + 2] = found.rank, found.member
      each.priority = math.max(each.priority, found.priority)
      tally(found.priority, 1, found.size)
      note(item[1], found)
      new[#new + 1], last = item[1], last + found.size
    end
    read = read + last
  end
  if #new == 0 then return has_more end
  new[#new + 1], new[#new + 2], new[#new + 3] = 'TIME', SINCE, 'JUSTID'
  redis.call('XCLAIM', requests, group, WAITING, 0, unpack(new))
  line_up(newcomers)
  return has_more
end

-- Returns the consumer that an entry is pending for; nil if it is pending for none, or is no id.
local function holder_of(entry)
  if not string.match(entry, '^%d+%-%d+$') then return nil end
  return (redis.call('XPENDING', requests, group, entry, entry, 1)[1] or {})[2]
end

-- Returns whether the entries of a consumer wait for workers, be it for all or for those with one model.
local function is_held(holder) return holder == WAITING or string.sub(holder or '', 1, #ASIDE) == ASIDE end

-- Notes that this worker has an entry that waited, and adds it to the answer. Returns whether the answer can hold more.
local function hand_over(entry, fields, was)
  local cost = tokens_of(was.size)
  if redis.call('HSETNX', charged, entry, cost .. noted(was)) == 1 then serve(was.tenant, cost) end
  redis.call('ZREM', due, entry)
  if was.slot then redis.call('ZREM', passed, entry) end
  if was.id then redis.call('HDEL', named, was.id) end
  if bodies[entry] then bodies[entry].is_taken = true end
  return add(entry, fields, was.size)
end

-- Does the same for an entry that has, or had, a place in a lane, and takes it out of there.
local function take_out(entry, fields)
  local was = place(entry, fields)
  tally(was.priority, -1, -was.size)
  local before = priority_next(was.tenant)
  redis.call('ZREM', lane_of .. was.tenant, was.member)
  seat(was.tenant, before, priority_next(was.tenant))
  return hand_over(entry, fields, was)
end

-- Gives an entry to this worker, if it waits. Returns whether it did, and whether the answer can hold more.
local function take_held(entry)
  local holder = holder_of(entry)
  local claimed = is_held(holder) and redis.call('XCLAIM', requests, group, worker, 0, entry)[1]
  if not claimed then return false, true end
  if holder == WAITING then return true, take_out(entry, claimed[2]) end
  local was = place(entry, claimed[2])
  redis.call('ZREM', aside_of .. string.sub(holder, #ASIDE + 1), was.member)
  return true, hand_over(entry, claimed[2], was)
end

-- Makes an entry that somebody has wait again. It keeps its charge. If workers had it (`has_had`), it goes before all entries of
-- its tenant and priority that no worker has had. Returns whether it is still there; if it was deleted, nothing is left of it.
local function put_back(entry, found, has_had)
  if not found or #redis.call('XCLAIM', requests, group, WAITING, 0, entry, 'TIME', SINCE, 'JUSTID') == 0 then
    redis.call('XACK', requests, group, entry)
    redis.call('HDEL', charged, entry)
    return false
  end
  local rank = has_had and rank_of(found.priority, math.max(0, found.before - AGAIN)) or found.rank
  tally(found.priority, 1, found.size)
  line_up({{name = found.tenant, priority = found.priority, ranked = {rank, found.member}}})
  note(entry, found)
  return true
end

-- Does the same with up to `limit` entries of a consumer, until it has read bodies of `most` bytes. Returns how many entries it
-- handled, and whether there may be more.
local function put_back_all(consumer, limit)
  local entries = {}
  for i, item in ipairs(redis.call('XPENDING', requests, group, '-', '+', limit, consumer)) do entries[i] = item[1] end
  if #entries == 0 then return 0, false end
  for i, text in ipairs(redis.call('HMGET', charged, unpack(entries))) do
    if bytes_read >= most then return i - 1, true end
    put_back(entries[i], place_known(entries[i], text), true)
  end
  return #entries, #entries == limit
end
