-- KEYS: state, reply. Answers epoch, instance, id of the last entry.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'instance')
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return {s[1], s[2], newest and newest[1]}
