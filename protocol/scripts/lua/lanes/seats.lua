-- Seats tenants: a tenant that waits is in the band of its next entry, with a counter of what it was served.
--
-- Reads lanes, bands, `service` and `weights`; writes all of them.
-- Loaded after lanes/accounts.lua.
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
