-- After sized.lua. KEYS: requests. ARGV from 6 on: whose entries are taken, those of the first one first.
for i = 6, #ARGV do
  for _, item in ipairs(redis.call('XPENDING', KEYS[1], group, '-', '+', count - #found, ARGV[i])) do
    local entry = redis.call('XCLAIM', KEYS[1], group, worker, 0, item[1])[1]
    if entry and not add(entry[1], entry[2]) then return found end
  end
  if #found >= tonumber(count) then return found end
end
return found
