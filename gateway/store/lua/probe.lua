-- KEYS: any that nobody else uses. ARGV: its time to live in ms.

redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
return 1
