-- Looks up the owner of a request, and the last entry of its reply.
--
-- KEYS: state, reply.
-- Answers epoch, instance, and the id of that entry. The id is missing if there is none.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'instance')
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return {s[1], s[2], newest and newest[1]}
