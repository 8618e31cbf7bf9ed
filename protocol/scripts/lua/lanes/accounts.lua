-- Keeps the accounts of what tenants have been served. protocol/keys.py describes the keys.
--
-- KEYS: requests; the prefix of lanes; the prefix of bands; bands; service; weights; charged; due.
-- ARGV, for `settle_own`: group, worker; then for each entry, the oldest first, its id, its tenant and what it has cost in all
-- ('' if that is as charged).
-- Loaded after shared/ranks.lua and shared/weights.lua.
local requests, lane_of, band_of, bands, service, weights, charged, due = unpack(KEYS, 1, 8)
local FLOOR = '/floor'  -- a field of `weights`, which is not a tenant's name: what the last tenant to leave had been served
local CREDIT = 8192  -- tokens, over the weight: what a tenant that was served less may make up for when it comes back
local MOST_BANDS = 16  -- bands that a search for the least served tenant looks at

local function number(value) return string.format('%.17g', value) end

-- Returns the priority of a tenant's next entry, or nil if none waits.
local function priority_next(tenant)
  local rank = redis.call('ZRANGE', lane_of .. tenant, 0, 0, 'WITHSCORES')[2]
  return rank and priority_of(tonumber(rank))
end

local function floor() return tonumber(redis.call('HGET', weights, FLOOR) or 0) or 0 end

-- Returns the least that any tenant that waits with this priority has been served, or nil if none waits.
local function least(priority)
  return tonumber(redis.call('ZRANGE', band_of .. priority, 0, 0, 'WITHSCORES')[2])
end

-- Returns the least that any waiting tenant has been served (nil if none waits), and whether all bands were looked at.
local function least_of_all()
  local active, lowest = redis.call('ZRANGE', bands, 0, MOST_BANDS), nil
  for i = 1, math.min(#active, MOST_BANDS) do
    local counter = least(active[i])
    lowest = counter and math.min(lowest or counter, counter) or lowest
  end
  return lowest, #active <= MOST_BANDS
end

-- Returns the least that a tenant counts as served when it comes back. `lowest` is the least that any waiting tenant has been
-- served. If none waits, the answer is what the last tenant to leave had been served.
local function base(lowest) return lowest and math.max(0, lowest - CREDIT) or floor() end

-- Adds to what a tenant has been served, or subtracts what was estimated too high. A tenant that was forgotten starts from
-- `base`, because it had been served no more.
local function serve(tenant, tokens)
  if tokens == 0 then return end
  local more, priority = number(tokens / valid_weight(redis.call('HGET', weights, tenant))), priority_next(tenant)
  if priority then
    redis.call('ZINCRBY', band_of .. priority, more, tenant)
  else
    if not redis.call('ZSCORE', service, tenant) then
      redis.call('ZADD', service, number(base((least_of_all()))), tenant)
    end
    redis.call('ZINCRBY', service, more, tenant)
  end
end

-- `tokens_in` and `place_in` read what `charged` holds of an entry: what its tenant was charged so far and, after a space, the
-- place of the entry if a script knew it.
local function tokens_in(noted) return tonumber(string.match(noted or '', '^%S+') or 0) or 0 end

local function place_in(noted) return string.match(noted or '', ' .*') or '' end

-- Charges tenants the part of their entries' total costs that is not charged yet. An entry without a total keeps its charge.
-- Returns what `charged` held.
local function charge(entries, tenants, totals)
  local added, noted = {}, redis.call('HMGET', charged, unpack(entries))
  for i, before in ipairs(noted) do
    if totals[i] then
      added[tenants[i]] = (added[tenants[i]] or 0) + totals[i] - tokens_in(before)
    end
  end
  for tenant, tokens in pairs(added) do serve(tenant, tokens) end
  return noted
end

-- Settles the bills in ARGV for the entries that this worker has. A worker that was frozen would otherwise speak for its
-- successor. Returns the entries, their totals (false if the charge stays), and what `charged` held.
local function settle_own()
  local entries, tenants, totals, mine = {}, {}, {}, {}
  local from, last, page = ARGV[3], ARGV[#ARGV - 2], #ARGV
  while from do
    local found = redis.call('XPENDING', requests, ARGV[1], from, last, page, ARGV[2])
    for _, item in ipairs(found) do mine[item[1]] = true end
    from = #found == page and '(' .. found[page][1] or nil
  end
  for i = 3, #ARGV, 3 do
    if mine[ARGV[i]] then
      local at = #entries + 1
      entries[at], tenants[at], totals[at] = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]) or false
    end
  end
  return entries, totals, #entries > 0 and charge(entries, tenants, totals) or {}
end
