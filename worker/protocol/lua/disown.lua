-- After owned.lua. KEYS: requests. ARGV: group, worker, who they go to, entry ids.
local released = 0
for i = 4, #ARGV do
  if owned(KEYS[1], ARGV[1], ARGV[2], ARGV[i]) then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[i], 'JUSTID')
    released = released + 1
  end
end
return released
