-- After owned.lua. KEYS: requests, the heartbeat of who it goes to. ARGV: group, worker, who it goes to, entry id.
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
if owned(KEYS[1], ARGV[1], ARGV[2], ARGV[4]) then
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[4], 'JUSTID')
end
return 1
