-- After weighed.lua. KEYS: requests. ARGV[6]: whose entries are taken.
for _, item in ipairs(redis.call('XPENDING', KEYS[1], group, '-', '+', count, ARGV[6])) do
  local entry = redis.call('XCLAIM', KEYS[1], group, worker, 0, item[1])[1]
  if entry and not hand_out(entry[1], entry[2]) then break end
end
return found
