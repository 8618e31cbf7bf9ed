-- Returns whether the time of a call is over.
--
-- Loaded after clock.lua.
local function overdue(entry, timeout)
  return clock() > tonumber(string.match(entry, '^%d+')) + timeout
end
