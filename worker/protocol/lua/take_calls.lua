-- After clock.lua, overdue.lua, owned.lua and sized.lua. KEYS: calls.
--
-- What this worker has in hand stays its own; what somebody has left alone for too long is taken over; then come new
-- ones. A call whose time is over is dropped; of any number of them only so many in one run, which holds up the whole server.
-- An answer has, beside what sized.lua puts there, how often it was taken. The stream expires once nobody takes calls.
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
