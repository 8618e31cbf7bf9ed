-- KEYS: any. Returns the time of its server's clock in seconds.
return tonumber(redis.call('TIME')[1])
