-- Ends the reply to a request that cannot be claimed, unless the reply has ended.
--
-- KEYS: reply.
-- ARGV: time to live (ms); the highest epoch; the fields and values of the end.
-- Answers 'ok'; 'already' if the reply has ended; 'unwritable' if it is not a stream, or holds an id that no epoch can exceed.
-- Loaded after shared/clock.lua.
local ttl, max_epoch = ARGV[1], tonumber(ARGV[2])
local epoch = clock_us()
local newest = redis.pcall('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if newest.err then return string.find(newest.err, 'WRONGTYPE', 1, true) and 'unwritable' or newest end
local last = newest[1]
if last then
  for i = 1, #last[2], 2 do
    if last[2][i] == 'type' and last[2][i + 1] == 'end' then return 'already' end
  end
  epoch = math.max(epoch, tonumber(string.match(last[1], '^%d+')) + 1)
end
if epoch > max_epoch then return 'unwritable' end
redis.call('XADD', KEYS[1], string.format('%d', epoch) .. '-0', unpack(ARGV, 3))  -- the schema allows few fields
redis.call('PEXPIRE', KEYS[1], ttl)
return 'ok'
