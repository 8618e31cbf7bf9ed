-- Publishes the report of a worker, and lists the worker. All workers are listed for equally long: one that would be listed
-- longer was listed before the server's clock was set back, and is cut to that.
--
-- KEYS: report, reports.
-- ARGV: worker; the report; how long the report stays (ms); how long the worker is listed (ms).
-- Loaded after shared/clock.lua, shared/junk.lua and presence/members.lua.
local last = clock() + ARGV[4]
for _, worker in ipairs(redis.call('ZRANGE', KEYS[2], string.format('(%d', last), '+inf', 'BYSCORE')) do
  redis.call('ZADD', KEYS[2], string.format('%d', last), worker)
end
enter(KEYS[2], ARGV[1], tonumber(ARGV[4]))
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
