-- After owned.lua and accounts.lua. ARGV: group, worker, and for each entry its id, its tenant, what it has cost in all
-- (empty: as was charged).
local entries, tenants, totals = {}, {}, {}
for i = 3, #ARGV, 3 do
  if owned(requests, ARGV[1], ARGV[2], ARGV[i]) then
    local at = #entries + 1
    entries[at], tenants[at], totals[at] = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  end
end
if #entries == 0 then return 0 end
charge(entries, tenants, totals)
redis.call('XACK', requests, ARGV[1], unpack(entries))
redis.call('XDEL', requests, unpack(entries))
redis.call('HDEL', charged, unpack(entries))
return #entries
