-- After accounts.lua. ARGV as of `settle_own`.
local entries = #ARGV > 2 and settle_own() or {}
if #entries == 0 then return 0 end
redis.call('XACK', requests, ARGV[1], unpack(entries))
redis.call('XDEL', requests, unpack(entries))
redis.call('HDEL', charged, unpack(entries))
return #entries
