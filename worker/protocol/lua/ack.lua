-- After accounts.lua and forget.lua. ARGV as of `settle_own`. KEYS from 9 on: seen, of requests whose replies have ended.
local entries = #ARGV > 2 and settle_own() or {}
if #entries == 0 then return 0 end
redis.call('XACK', requests, ARGV[1], unpack(entries))
redis.call('XDEL', requests, unpack(entries))
redis.call('HDEL', charged, unpack(entries))
local left = {}
for _, entry in ipairs(entries) do left[entry] = true end
for i = 9, #KEYS do forget(KEYS[i], left) end
return #entries
