-- After lanes.lua. KEYS from 13 on: the consumer's heartbeat, digests, room, serving, the consumer's nudges and report. It is named
-- as the worker of the script is.
--
-- What else says that the consumer serves, and lapses with its heartbeat, may last longer where the server's clock was set back.
if redis.call('EXISTS', KEYS[13]) == 1 then return -1 end
redis.pcall('ZREM', KEYS[16], worker)
redis.call('XACK', KEYS[17], group, '0-1')  -- DEL would remove anything
redis.call('DEL', KEYS[17])
redis.call('DEL', KEYS[18])  -- of another selector in users.acl
local freed = put_back_all(worker, count)
keep_notes()
keep_counts()
if #redis.call('XPENDING', requests, group, '-', '+', 1, worker) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', requests, group, worker)
  redis.pcall('HDEL', KEYS[14], worker)
  redis.pcall('ZREM', KEYS[15], worker)
  if is_held(worker) then
    local aside = aside_of .. string.sub(worker, #ASIDE + 1)
    redis.call('ZRANGE', aside, 0, 0)
    redis.call('DEL', aside)
  end
end
return freed
