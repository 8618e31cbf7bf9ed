-- After lanes.lua. ARGV from 6 on, for each entry: its id, its tenant, what it has cost in all.
--
-- Only who has an entry says what it costs: so what is said last is true, and nothing is charged once it was settled.
local mine = {}
for _, item in ipairs(redis.call('XPENDING', requests, group, '-', '+', (#ARGV - 5) / 3 + 1000, worker)) do
  mine[item[1]] = true
end
local totals, added = {}, {}
for i = 6, #ARGV, 3 do
  local entry, tenant, total = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  if mine[entry] then
    totals[#totals + 1], totals[#totals + 2] = entry, total
    added[tenant] = (added[tenant] or 0) + total - (tonumber(redis.call('HGET', charged, entry) or 0) or 0)
  end
end
if #totals > 0 then redis.call('HSET', charged, unpack(totals)) end
for tenant, tokens in pairs(added) do serve(tenant, tokens) end
return #totals / 2
