-- Makes entries of this worker wait again. It stops early once it has read bodies of many bytes.
--
-- KEYS: those of lanes.lua.
-- ARGV: 1 to 5 as in sized.lua; 6: whether workers have had the entries; from 7 on the entries.
-- Answers how many entries it looked at, from the first on, and how many of them wait now.
-- Loaded after shared/owned.lua and lanes/orphans.lua.
local looked, put, given_back = 0, 0, {}
for i, text in ipairs(#ARGV > 6 and redis.call('HMGET', charged, unpack(ARGV, 7)) or {}) do
  if bytes_read >= most then break end
  local entry = ARGV[6 + i]
  if owned(requests, group, worker, entry) and put_back(entry, place_known(entry, text), ARGV[6] == '1') then
    put, given_back[put + 1] = put + 1, entry
  end
  looked = i
end
if ARGV[6] == '1' then note_orphans(given_back, clock()) end
keep_notes()
keep_counts()
return {looked, put}
