-- KEYS: state, reply. ARGV: an entry id. Answers epoch, instance, id and fields of the first entry from there on.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'instance')
local found = redis.call('XRANGE', KEYS[2], ARGV[1], '+', 'COUNT', 1)[1]
return {s[1], s[2], found and found[1], found and found[2]}
