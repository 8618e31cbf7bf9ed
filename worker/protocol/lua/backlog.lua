-- After accounts.lua. What waits is counted as it gets its place and as that goes. The last of KEYS: backlog, which has
-- entries and bytes of each priority. Where these are not what is pending for WAITING, recount.lua makes them anew.
local backlog = KEYS[#KEYS]
local entries_of, bytes_of = {}, {}  -- by priority: what came, less what went

local function tally(priority, entries, bytes)
  entries_of[priority] = (entries_of[priority] or 0) + entries
  bytes_of[priority] = (bytes_of[priority] or 0) + bytes
end

-- Writes the counts. What came and went within one script costs nothing. Where somebody wrote something else, they are wrong
-- for a second or two.
local function keep_counts()
  for priority, entries in pairs(entries_of) do
    if entries ~= 0 then redis.pcall('HINCRBY', backlog, priority .. ' entries', entries) end
    if bytes_of[priority] ~= 0 then redis.pcall('HINCRBY', backlog, priority .. ' bytes', bytes_of[priority]) end
  end
end
