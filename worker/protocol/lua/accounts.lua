-- What tenants have been served. KEYS, in this order: requests; lanes and bands, without a tenant and a priority; bands;
-- service; weights; charged; due. docs/lanes.md says what they hold.
local requests, lane_of, band_of, bands, service, weights, charged, due = unpack(KEYS, 1, 8)
local FLOOR = '/floor'  -- in `weights`, where no tenant is called so: what the last tenant to leave had been served
local SPAN = 2 ^ 42  -- ms: until the year 2109
local CREDIT = 8192  -- tokens, over the weight: what one that was served less than others may make up for when it comes back
local MOST_BANDS = 16  -- that are looked at for who was served the least

local function number(value) return string.format('%.17g', value) end

local function priority_of(rank) return 1000 - math.floor(rank / SPAN) end

-- The priority of a tenant's next entry; nil if none waits.
local function priority_next(tenant)
  local rank = redis.call('ZRANGE', lane_of .. tenant, 0, 0, 'WITHSCORES')[2]
  return rank and priority_of(tonumber(rank))
end

local function floor() return tonumber(redis.call('HGET', weights, FLOOR) or 0) or 0 end

-- The least that anybody who waits with this priority has been served; nil if nobody does.
local function least(priority)
  return tonumber(redis.call('ZRANGE', band_of .. priority, 0, 0, 'WITHSCORES')[2])
end

-- The least that anybody who waits has been served (nil: nobody does), and whether all were looked at.
local function least_of_all()
  local active, lowest = redis.call('ZRANGE', bands, 0, MOST_BANDS), nil
  for i = 1, math.min(#active, MOST_BANDS) do
    local counter = least(active[i])
    lowest = counter and math.min(lowest or counter, counter) or lowest
  end
  return lowest, #active <= MOST_BANDS
end

-- What one has been served no less than that comes back while others wait, the least of whom has been served so much. If
-- nobody waits, it is what the last one to leave had been.
local function base(lowest) return lowest and math.max(0, lowest - CREDIT) or floor() end

local function valid_weight(text)
  local weight = tonumber(text or 1)
  return weight and weight > 0 and weight < math.huge and weight or 1
end

-- Adds to what a tenant has been served, or takes off what was estimated too high. Of one that was forgotten as much is known
-- as that it had not more.
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

-- What `charged` has of an entry: what its tenant was charged so far, and behind a space, where a script knew it, its place.
local function tokens_in(noted) return tonumber(string.match(noted or '', '^%S+') or 0) or 0 end

local function place_in(noted) return string.match(noted or '', ' .*') or '' end

-- Charges tenants for what their entries have cost in all, as far as that is not charged. Of an entry without a total it
-- stays. Answers what `charged` had.
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

-- Of the bills in ARGV (group, worker, and for each entry, the oldest first, its id, its tenant and what it has cost in all,
-- or '' if that is as was charged): those of entries that this worker has, settled. One that was frozen would speak for its
-- successor. Answers the entries, their totals, and what `charged` had.
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
