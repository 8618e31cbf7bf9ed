-- No keys. ARGV: of each command the number of its words, then these.
--
-- Answers the places of those that this user may not run. None is run.
local denied, number, at = {}, 0, 1
if not redis.acl_check_cmd then return denied end
while ARGV[at] do
  local count = tonumber(ARGV[at])
  if not redis.acl_check_cmd(unpack(ARGV, at + 1, at + count)) then denied[#denied + 1] = number end
  number, at = number + 1, at + 1 + count
end
return denied
