-- After accounts.lua. ARGV as of `settle_own`: what is said last is true, and nothing is charged once it was settled.
local entries, totals, before = settle_own()
if #entries == 0 then return 0 end
local noted = {}
for i, entry in ipairs(entries) do
  noted[2 * i - 1], noted[2 * i] = entry, number(totals[i] or tokens_in(before[i])) .. place_in(before[i])
end
redis.call('HSET', charged, unpack(noted))
return #entries
