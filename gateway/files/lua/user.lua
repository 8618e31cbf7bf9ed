-- KEYS: a file's users. Returns a batch that still needs the file, if any.
local time = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[1], time[1] * 1000, '+inf', 'LIMIT', 0, 1)
