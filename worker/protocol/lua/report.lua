-- After clock.lua, junk.lua and members.lua. KEYS: report, reports. ARGV: worker, the report, for how long it stays, for how long the
-- worker is listed (ms).
-- All workers are listed for equally long: one that is to be longer was listed before the server's clock was set back.
local last = clock() + ARGV[4]
for _, worker in ipairs(redis.call('ZRANGE', KEYS[2], string.format('(%d', last), '+inf', 'BYSCORE')) do
  redis.call('ZADD', KEYS[2], string.format('%d', last), worker)
end
enter(KEYS[2], ARGV[1], tonumber(ARGV[4]))
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
