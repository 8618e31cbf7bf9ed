-- Tells which commands this user may not run. It runs none of them.
--
-- KEYS: none.
-- ARGV: for each command, how many words it has, and these words.
-- Answers the places of the denied commands, from 0 on. If the server cannot tell, it answers none.
local denied, number, at = {}, 0, 1
if not redis.acl_check_cmd then return denied end
while ARGV[at] do
  local count = tonumber(ARGV[at])
  if not redis.acl_check_cmd(unpack(ARGV, at + 1, at + count)) then denied[#denied + 1] = number end
  number, at = number + 1, at + 1 + count
end
return denied
