-- Gives calls to a worker: those that another worker left alone for too long, then new ones. Calls that the worker has in hand
-- stay its own. A call is dropped if its time is over. One run drops a limited number, because it holds up the whole server. The
-- stream expires once no worker takes calls.
--
-- KEYS: calls.
-- ARGV: 1 to 5 as in sized.lua; 6: after how many ms a call counts as left alone; 7: the timeout (ms) of a call that has none; 8:
-- the longest timeout (ms); 9: how many calls one run drops; from 10 on the calls in hand.
-- Answers as in sized.lua, with the number of times that each call was taken.
-- Loaded after shared/clock.lua, calls/overdue.lua, shared/owned.lua and shared/sized.lua.
local idle, default, longest, most_dropped = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local calls, dropped = KEYS[1], 0
redis.call('PEXPIRE', calls, longest)
for i = 10, #ARGV do
  if owned(calls, group, worker, ARGV[i]) then redis.call('XCLAIM', calls, group, worker, 0, ARGV[i], 'JUSTID') end
end
local function drop(id)
  redis.call('XACK', calls, group, id)
  redis.call('XDEL', calls, id)
  dropped = dropped + 1
end
local function timeout_of(fields)
  local timeout = default
  for i = 1, #fields, 2 do
    local given = fields[i] == 'timeout_ms' and string.match(fields[i + 1], '^[1-9]%d?%d?%d?%d?%d?%d?%d?%d?$')
    if given and tonumber(given) <= longest then timeout = tonumber(given) end
  end
  return timeout
end
local function take(id, fields, times)
  if overdue(id, timeout_of(fields)) then
    drop(id)
    return true
  end
  local goes_on = add(id, fields)
  found[#found][5] = times
  return goes_on
end

count = tonumber(count)
for _, item in ipairs(redis.call('XPENDING', calls, group, 'IDLE', idle, '-', '+', count)) do
  local claimed = redis.call('XCLAIM', calls, group, worker, 0, item[1])[1]  -- nil: it was trimmed or deleted meanwhile
  if claimed and not take(item[1], claimed[2], item[4] + 1) then return found end
end
while #found < count and dropped < most_dropped do
  local answer = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', 1, 'STREAMS', calls, '>')
  if not answer or not take(answer[1][2][1][1], answer[1][2][1][2], 1) then break end
end
return found
