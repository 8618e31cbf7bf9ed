-- After owned.lua and lanes.lua. ARGV[6]: whether workers have had the entries; from 7 on entries of this worker, which wait
-- again. Answers how many were looked at, from the first on: not all, where bodies of many bytes had to be read; and how many
-- wait now.
local looked, put = 0, 0
for i, text in ipairs(#ARGV > 6 and redis.call('HMGET', charged, unpack(ARGV, 7)) or {}) do
  if bytes_read >= most then break end
  local entry = ARGV[6 + i]
  if owned(requests, group, worker, entry) and put_back(entry, place_known(entry, text), ARGV[6] == '1') then put = put + 1 end
  looked = i
end
keep_notes()
keep_counts()
return {looked, put}
