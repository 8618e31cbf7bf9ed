-- Orders the entries of a lane by one number: the highest priority first, then what is due first. ranks.py has the same numbers.
local HIGHEST, LOWEST = 1000, -1000  -- priorities
local SPAN = 2 ^ 42  -- ms that the ranks of one priority span: dates fit in until the year 2109

local function rank_of(priority, due_ms) return string.format('%.0f', (HIGHEST - priority) * SPAN + due_ms) end

local function priority_of(rank) return HIGHEST - math.floor(rank / SPAN) end
