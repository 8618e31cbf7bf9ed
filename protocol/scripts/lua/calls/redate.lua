-- Redates calls that seem to have been taken later than now, because the server's clock was set back since. Until that time no
-- worker would take them over. They count as taken now, and stay with their workers.
--
-- KEYS: calls.
-- ARGV: group; how many calls it looks at.
-- Answers 1.
for _, item in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[2])) do
  if item[3] == 0 then redis.call('XCLAIM', KEYS[1], ARGV[1], item[2], 0, item[1], 'JUSTID') end
end
return 1
