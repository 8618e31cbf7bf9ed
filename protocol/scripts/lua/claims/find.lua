-- Looks up the owner of a request, and the first entry of its reply from an id on.
--
-- KEYS: state, reply.
-- ARGV: the id.
-- Answers epoch, instance, and the id and fields of that entry. The last two are missing if there is none.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'instance')
local found = redis.call('XRANGE', KEYS[2], ARGV[1], '+', 'COUNT', 1)[1]
return {s[1], s[2], found and found[1], found and found[2]}
