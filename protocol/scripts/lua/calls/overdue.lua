-- Returns whether the time of a call is over.
--
-- Loaded after shared/clock.lua.
local function overdue(entry, timeout)
  return clock() > tonumber(string.match(entry, '^%d+')) + timeout
end
