-- After owned.lua and lanes.lua. ARGV from 6 on, for each entry: its id, its tenant, what it has cost in all (empty: as
-- was charged).
local gone, added = {}, {}
for i = 6, #ARGV, 3 do
  local entry, tenant, total = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  if owned(requests, group, worker, entry) then
    if total then
      added[tenant] = (added[tenant] or 0) + total - (tonumber(redis.call('HGET', charged, entry) or 0) or 0)
    end
    gone[#gone + 1] = entry
  end
end
if #gone == 0 then return 0 end
redis.call('XACK', requests, group, unpack(gone))
redis.call('XDEL', requests, unpack(gone))
redis.call('HDEL', charged, unpack(gone))
for tenant, tokens in pairs(added) do serve(tenant, tokens) end
return #gone
