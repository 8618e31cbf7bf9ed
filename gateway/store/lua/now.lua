-- KEYS: any. Answers the seconds of the clock of its server.
return tonumber(redis.call('TIME')[1])
