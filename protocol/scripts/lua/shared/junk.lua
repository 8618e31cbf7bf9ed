-- Sets aside a key that holds what no worker writes there, though no command fails over it. guard.lua does it, when it runs the
-- script again.
local function junk(key)
  if not redis.junk then error({err = 'JUNK ' .. key}) end
  redis.junk(key)
end
