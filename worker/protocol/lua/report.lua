-- After clock.lua and members.lua. KEYS: report, reports. ARGV: worker, the report, for how long it stays, for how long the
-- worker is listed (ms).
enter(KEYS[2], ARGV[1], tonumber(ARGV[4]))
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
