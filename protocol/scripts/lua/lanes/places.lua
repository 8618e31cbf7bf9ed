-- Finds the place of an entry: tenant, rank and member in its lane. It follows from the entry's body.
--
-- A script reads a body when the entry gets its first place, and when a worker gets the entry; it reads it once if one run does
-- both. The place is kept with what the entry was charged, for the time when no worker has the entry any more.
--
-- Reads `requests`, but only for a place that `charged` does not have, and counts in `bytes_read` what it read. Writes nothing.
-- Loaded after shared/ranks.lua and lanes/accounts.lua.
local PATIENCE = 60000  -- ms until an entry without a deadline is due, among entries of its tenant that have one
local LONGEST = 604800000  -- ms: the longest deadline
local BYTES_PER_TOKEN = 4  -- an estimate for prompts that are not tokenized yet
local BEGINNING = 1000  -- bytes of a prompt: prompts that begin with the same ones have the same home
local SLOTS = 1024  -- fields that `homes` can have
local bytes_read = 0  -- of entries that are not new
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
