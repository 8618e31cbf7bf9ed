-- Leaves entries to the workers that are their homes, and tells these.
--
-- KEYS: from 14 on homes, room, serving, and the prefix of nudges.
-- ARGV: 10: for how long (ms) an entry is left to its home.
-- Reads these keys and `passed`. Writes `homes` for a slot that has none, `passed`, and a nudge for each worker that an entry is
-- left to. `left_ms` says in how many ms any worker may take the first of them.
-- Loaded after shared/homes.lua and lanes/lanes.lua.
local homes, room, serving, nudge_of = unpack(KEYS, 14, 17)
local steal_after, now, left_ms = tonumber(ARGV[10]), clock(), nil
local home, rooms = {}, {}  -- by slot; by worker
-- Notes where entries that have a slot are at home, and since when they were left there.
local function look_up(entries)
  local slots, ids = {}, {}
  for _, each in ipairs(entries) do
    if each.slot ~= '' then slots[#slots + 1], ids[#ids + 1] = each.slot, each.id end
  end
  if #slots == 0 then return end
  local names, since = redis.call('HMGET', homes, unpack(slots)), redis.call('ZMSCORE', passed, unpack(ids))
  for i, slot in ipairs(slots) do
    home[slot] = home[slot] or home_of(homes, serving, tonumber(slot), names[i]) or worker
    local name = home[slot]
    rooms[name] = rooms[name] or tonumber(redis.call('ZSCORE', room, name) or 0)
  end
  local at = 1
  for _, each in ipairs(entries) do
    if each.slot ~= '' then
      each.home, each.since, at = home[each.slot], tonumber(since[at]), at + 1
      if each.since and each.since > now then each.since = nil end  -- the clock was set back: it is left from now on
    end
  end
end

-- Tells workers that entries are left to them. An entry that was left before keeps its time.
local function leave(tenants)
  local new, told = {}, {}
  for _, tenant in ipairs(tenants) do
    for _, each in ipairs(tenant.left) do
      if not each.since and not each.full_ms then
        new[#new + 1], new[#new + 2] = number(now), each.id
        if not told[each.home] then
          told[each.home] = true
          nudge(nudge_of, each.home)
        end
      end
      local ms = each.full_ms and math.ceil(each.full_ms) or steal_after - now + (each.since or now)
      left_ms = math.min(left_ms or steal_after, ms)
    end
  end
  if #new > 0 then redis.call('ZADD', passed, 'LT', unpack(new)) end
end
