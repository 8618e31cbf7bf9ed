-- After owned.lua and lanes.lua. ARGV from 6 on, for each entry: its id, its tenant, what it has cost in all (empty: as
-- was charged).
local gone, owners, totals, added = {}, {}, {}, {}
for i = 6, #ARGV, 3 do
  if owned(requests, group, worker, ARGV[i]) then
    gone[#gone + 1], owners[#gone + 1], totals[#gone + 1] = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  end
end
if #gone == 0 then return 0 end
for i, before in ipairs(redis.call('HMGET', charged, unpack(gone))) do
  if totals[i] then added[owners[i]] = (added[owners[i]] or 0) + totals[i] - (tonumber(before or 0) or 0) end
end
redis.call('XACK', requests, group, unpack(gone))
redis.call('XDEL', requests, unpack(gone))
redis.call('HDEL', charged, unpack(gone))
for tenant, tokens in pairs(added) do serve(tenant, tokens) end
return #gone
