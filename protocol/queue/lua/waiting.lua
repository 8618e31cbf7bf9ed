-- Estimates a request's wait in seconds, from the workers' numbers for the queue once a second (`load`); nil if unknown.
--
-- Requests of higher priority go before it. Within its priority, so do its tenant's requests that are due earlier, and while
-- these wait, other tenants' in turn, by weights. Later requests of higher priority and ageing are not predicted.
local SPAN = 2 ^ 42  -- as in accounts.lua: lanes are ordered by (1000 - priority) * SPAN + when entries are due
local FRESH = 5000  -- ms: older numbers are ignored


local function seconds_to_wait(load, lane, band, weights, timeout, priority, tenant)
  local known = redis.pcall('HMGET', load, 'at_ms', 'rate', 'bands')
  if not (known[1] and known[2] and known[3]) or known[3] == '' then return nil end
  local time = redis.call('TIME')
  local now, rate = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(known[2])
  if math.abs(now - known[1]) > FRESH or rate <= 0 then return nil end

  local before, beside, count = 0, 0, 0  -- tokens of higher priority; tokens and requests of the same
  for each, entries, tokens in string.gmatch(known[3], '(%-?%d+):(%d+):(%d+)') do
    if tonumber(each) > priority then before = before + tokens end
    if tonumber(each) == priority then beside, count = tonumber(tokens), tonumber(entries) end
  end
  if count == 0 or (before + beside) / rate <= timeout then return (before + beside) / rate end

  local rank = (1000 - priority) * SPAN
  local due = string.format('%.0f', rank + now + 1000 * timeout)
  local own = redis.pcall('ZCOUNT', lane, string.format('%.0f', rank), due)
  local tenants, weight = redis.pcall('ZCARD', band), redis.pcall('HGET', weights, tenant)
  if type(own) ~= 'number' or type(tenants) ~= 'number' then return nil end  -- not for this user to know
  weight = type(weight) == 'string' and tonumber(weight)
  weight = weight and weight > 0 and weight or 1
  local others = math.max(0, own > 0 and tenants - 1 or tenants)
  local turns = own + others * (own + 1) / weight
  return (before + math.min(beside, turns * beside / count)) / rate
end
