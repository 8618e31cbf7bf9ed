-- What tenants have been served. KEYS, in this order: requests; lanes and bands, without a tenant and a priority; bands;
-- service; weights; charged; due. docs/lanes.md says what they hold.
local requests, lane_of, band_of, bands, service, weights, charged, due = unpack(KEYS, 1, 8)
local FLOOR = '/floor'  -- in `weights`, where no tenant is called so: what the last tenant to leave had been served
local SPAN = 2 ^ 42  -- ms: until the year 2109

local function number(value) return string.format('%.17g', value) end

local function priority_of(rank) return 1000 - math.floor(rank / SPAN) end

-- The priority of a tenant's next entry; nil if none waits.
local function priority_next(tenant)
  local rank = redis.call('ZRANGE', lane_of .. tenant, 0, 0, 'WITHSCORES')[2]
  return rank and priority_of(tonumber(rank))
end

local function floor() return tonumber(redis.call('HGET', weights, FLOOR) or 0) or 0 end

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
    if not redis.call('ZSCORE', service, tenant) then redis.call('ZADD', service, number(floor()), tenant) end
    redis.call('ZINCRBY', service, more, tenant)
  end
end

-- Charges tenants for what their entries have cost in all, as far as that is not charged. Of an entry without a total it stays.
local function charge(entries, tenants, totals)
  local added = {}
  for i, before in ipairs(redis.call('HMGET', charged, unpack(entries))) do
    if totals[i] then
      added[tenants[i]] = (added[tenants[i]] or 0) + totals[i] - (tonumber(before or 0) or 0)
    end
  end
  for tenant, tokens in pairs(added) do serve(tenant, tokens) end
end
