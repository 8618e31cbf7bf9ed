-- After clock.lua.
local function overdue(entry, timeout)
  return clock() > tonumber(string.match(entry, '^%d+')) + timeout
end
