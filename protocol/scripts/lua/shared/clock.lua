-- Reads the clock of the server, in microseconds and in ms.
local function clock_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function clock() return math.floor(clock_us() / 1000) end
