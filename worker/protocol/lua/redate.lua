-- KEYS: calls. ARGV: group, how many at most.
--
-- Calls that were taken later than now, as the server's clock was set back since, would not be taken over until then. They count
-- as taken now, and stay whose they are.
for _, item in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[2])) do
  if item[3] == 0 then redis.call('XCLAIM', KEYS[1], ARGV[1], item[2], 0, item[1], 'JUSTID') end
end
return 1
