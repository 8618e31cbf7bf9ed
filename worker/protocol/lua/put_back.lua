-- After owned.lua and lanes.lua. ARGV from 6 on: entries of this worker, which wait again, before those that came after
-- them. Answers how many.
local put = 0
for i = 6, #ARGV do
  local item = redis.call('XRANGE', requests, ARGV[i], ARGV[i])[1]
  if item and owned(requests, group, worker, ARGV[i]) then
    put_back(ARGV[i], place(ARGV[i], item[2]))
    put = put + 1
  end
end
keep_counts()
return put
