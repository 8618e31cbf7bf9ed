-- After accounts.lua. ARGV: group, worker, and for each entry its id, its tenant, what it has cost in all.
--
-- Only who has an entry says what it costs: so what is said last is true, and nothing is charged once it was settled.
local mine = {}
for _, item in ipairs(redis.call('XPENDING', requests, ARGV[1], '-', '+', (#ARGV - 2) / 3 + 1000, ARGV[2])) do
  mine[item[1]] = true
end
local entries, tenants, totals, noted = {}, {}, {}, {}
for i = 3, #ARGV, 3 do
  if mine[ARGV[i]] then
    local at = #entries + 1
    entries[at], tenants[at], totals[at] = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
    noted[2 * at - 1], noted[2 * at] = entries[at], totals[at]
  end
end
if #entries == 0 then return 0 end
charge(entries, tenants, totals)
redis.call('HSET', charged, unpack(noted))
return #entries
