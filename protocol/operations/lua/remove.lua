-- After letter.lua. ARGV: letters.
local removed = 0
for i = 1, #ARGV do removed = removed + remove(ARGV[i]) end
return removed
