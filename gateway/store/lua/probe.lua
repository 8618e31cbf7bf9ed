-- KEYS: any that nobody else uses. ARGV: for how long it is there, in ms.
redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
return 1
