-- KEYS: a file's users. Returns a batch that still needs the file, if any.
-- Loaded after shared/clock.lua.
return redis.call('ZRANGEBYSCORE', KEYS[1], clock(), '+inf', 'LIMIT', 0, 1)
