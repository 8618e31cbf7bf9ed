-- Charges tenants for what entries of this worker have cost so far. The last total holds, and an entry that was settled is
-- charged nothing more.
--
-- KEYS and ARGV: as in accounts.lua.
-- Answers how many of the entries this worker has.
-- Loaded after lanes/accounts.lua.
local entries, totals, before = settle_own()
if #entries == 0 then return 0 end
local noted = {}
for i, entry in ipairs(entries) do
  noted[2 * i - 1], noted[2 * i] = entry, number(totals[i] or tokens_in(before[i])) .. place_in(before[i])
end
redis.call('HSET', charged, unpack(noted))
return #entries
