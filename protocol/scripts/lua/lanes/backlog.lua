-- Counts the entries and bytes that wait, by priority, whenever an entry gets a place or leaves it. If the counts differ from
-- what is pending for WAITING, recount.lua makes them anew.
--
-- KEYS: the last one is backlog, which has entries and bytes of each priority.
-- Loaded after lanes/accounts.lua.
local backlog = KEYS[#KEYS]
local entries_of, bytes_of = {}, {}  -- by priority, what came minus what went

local function tally(priority, entries, bytes)
  entries_of[priority] = (entries_of[priority] or 0) + entries
  bytes_of[priority] = (bytes_of[priority] or 0) + bytes
end

-- Writes the counts. An entry that comes and goes within one script costs nothing. If somebody wrote something else there, the
-- counts are wrong for a second or two.
local function keep_counts()
  for priority, entries in pairs(entries_of) do
    if entries ~= 0 then redis.pcall('HINCRBY', backlog, priority .. ' entries', entries) end
    if bytes_of[priority] ~= 0 then redis.pcall('HINCRBY', backlog, priority .. ' bytes', bytes_of[priority]) end
  end
end
