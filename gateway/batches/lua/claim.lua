-- KEYS: leases, holders. ARGV: length of a lease in ms, how many batches to take at most.
-- Returns pairs: a batch that nobody runs, and its new fencing token.
--
-- Beside its token a holder notes the length of its leases: one with longer to live dates from before the server's clock was
-- set back, and is cut.
-- Loaded after shared/clock.lua.
local now = clock()
local held = redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%d', now), '+inf', 'WITHSCORES')
for at = 1, #held, 2 do
  local token, noted = unpack(redis.call('HMGET', KEYS[2], held[at], held[at] .. '/lease'))
  local of, lease = string.match(noted or '', '^(%d+) (%d+)$')
  if of and of == token and tonumber(held[at + 1]) > now + lease then redis.call('ZADD', KEYS[1], now + lease, held[at]) end
end
local claimed = {}
for _, batch in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local token = redis.call('HINCRBY', KEYS[2], 'last', 1)
  redis.call('ZADD', KEYS[1], now + ARGV[1], batch)
  redis.call('HSET', KEYS[2], batch, token, batch .. '/lease', token .. ' ' .. ARGV[1])
  claimed[#claimed + 1] = batch
  claimed[#claimed + 1] = token
end
return claimed
