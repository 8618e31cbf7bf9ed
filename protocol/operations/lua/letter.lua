-- Removes a letter, and its size from the sum. KEYS of every script that does: letters, sizes, sum, as in bury.lua.
local function remove(letter)
  local removed = redis.call('XDEL', KEYS[1], letter)
  local noted = redis.call('XRANGE', KEYS[2], letter, letter)[1]
  if noted then
    redis.call('XDEL', KEYS[2], letter)
    redis.call('DECRBY', KEYS[3], noted[2][2])
  end
  return removed
end
