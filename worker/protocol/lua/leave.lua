-- KEYS: requests, heartbeat, drain, serving.
local group, worker, instance = unpack(ARGV)
if redis.call('GET', KEYS[2]) ~= instance then return 0 end
redis.call('DEL', KEYS[2], KEYS[3])
redis.pcall('ZREM', KEYS[4], worker)
if redis.call('EXISTS', KEYS[1]) == 1 and #redis.call('XPENDING', KEYS[1], group, '-', '+', 1, worker) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, worker)
end
return 1
