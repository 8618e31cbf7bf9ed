-- KEYS: records, revocations. ARGV: id of a key.
-- Returns how many keys there are, including revoked ones; the key's record; when it was revoked; the server's ms.
-- Loaded after shared/clock.lua.
return {
  redis.call('HLEN', KEYS[1]), redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[2], ARGV[1]), clock()
}
