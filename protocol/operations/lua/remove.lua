-- KEYS: as in letter.lua. ARGV: letters.
-- Loaded after letter.lua.
local removed = 0
for i = 1, #ARGV do removed = removed + remove(ARGV[i]) end
return removed
