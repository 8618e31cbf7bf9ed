-- Removes entries of this worker from the queue and settles their costs. It also marks requests that have ended.
--
-- KEYS: those of accounts.lua; from 9 on `seen` of the requests whose replies have ended.
-- ARGV: as in accounts.lua.
-- Answers how many entries were removed.
-- Loaded after lanes/accounts.lua and shared/forget.lua.
local entries = #ARGV > 2 and settle_own() or {}
if #entries == 0 then return 0 end
redis.call('XACK', requests, ARGV[1], unpack(entries))
redis.call('XDEL', requests, unpack(entries))
redis.call('HDEL', charged, unpack(entries))
local left = {}
for _, entry in ipairs(entries) do left[entry] = true end
for i = 9, #KEYS do forget(KEYS[i], left) end
return #entries
