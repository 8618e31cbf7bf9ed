-- Estimates a request's wait in seconds, from the workers' numbers for the queue once a second (`load`); nil if unknown.
--
-- Requests of higher priority go before it. Within its priority, so do its tenant's requests that are due earlier, and while
-- these wait, other tenants' in turn, by weights. Later requests of higher priority and ageing are not predicted.
-- Loaded after shared/clock.lua, shared/ranks.lua and shared/weights.lua.
local FRESH = 5000  -- ms: older numbers are ignored

local function seconds_to_wait(load, lane, band, weights, timeout, priority, tenant)
  local known = redis.pcall('HMGET', load, 'at_ms', 'rate', 'bands')
  if not (known[1] and known[2] and known[3]) or known[3] == '' then return nil end
  local now, rate = clock(), tonumber(known[2])
  if math.abs(now - known[1]) > FRESH or rate <= 0 then return nil end

  local before, beside, count = 0, 0, 0  -- tokens of higher priority; tokens and requests of the same
  for each, entries, tokens in string.gmatch(known[3], '(%-?%d+):(%d+):(%d+)') do
    if tonumber(each) > priority then before = before + tokens end
    if tonumber(each) == priority then beside, count = tonumber(tokens), tonumber(entries) end
  end
  if count == 0 or (before + beside) / rate <= timeout then return (before + beside) / rate end

  local own = redis.pcall('ZCOUNT', lane, rank_of(priority, 0), rank_of(priority, now + 1000 * timeout))
  local tenants, weight = redis.pcall('ZCARD', band), redis.pcall('HGET', weights, tenant)
  if type(own) ~= 'number' or type(tenants) ~= 'number' then return nil end  -- not for this user to know
  weight = valid_weight(type(weight) == 'string' and weight)
  local others = math.max(0, own > 0 and tenants - 1 or tenants)
  local turns = own + others * (own + 1) / weight
  return (before + math.min(beside, turns * beside / count)) / rate
end
