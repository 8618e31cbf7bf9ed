-- Keeps a set of members by when each lapses. The set expires with its last member.
--
-- KEYS: the caller passes the set.
-- Loaded after shared/clock.lua and shared/junk.lua.
local LONGEST = 10 * 366 * 86400000  -- ms: a member that lapses later is none of ours

local function enter(set, member, ttl)
  local now = clock()
  redis.call('ZADD', set, string.format('%d', now + ttl), member)
  redis.call('ZREMRANGEBYSCORE', set, '-inf', string.format('%d', now))
  local last = tonumber(redis.call('ZRANGE', set, -1, -1, 'WITHSCORES')[2])
  if last > now + LONGEST then
    junk(set)
    return enter(set, member, ttl)
  end
  redis.call('PEXPIREAT', set, string.format('%d', math.ceil(last)))
end
