-- After clock.lua. A set of members by when each lapses, which expires with its last one.
local function enter(set, member, ttl)
  local now = clock()
  local entry = {'ZADD', set, string.format('%d', now + ttl), member}
  if type(redis.pcall(unpack(entry))) ~= 'number' then  -- somebody wrote something else here
    redis.call('DEL', set)
    redis.call(unpack(entry))
  end
  redis.call('ZREMRANGEBYSCORE', set, '-inf', string.format('%d', now))
  redis.call('PEXPIREAT', set, redis.call('ZRANGE', set, -1, -1, 'WITHSCORES')[2])
end
