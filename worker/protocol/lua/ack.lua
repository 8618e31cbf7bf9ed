-- After owned.lua. KEYS: requests. ARGV: group, worker, entry ids.
local acked = 0
for i = 3, #ARGV do
  if owned(KEYS[1], ARGV[1], ARGV[2], ARGV[i]) then
    redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
    redis.call('XDEL', KEYS[1], ARGV[i])
    acked = acked + 1
  end
end
return acked
