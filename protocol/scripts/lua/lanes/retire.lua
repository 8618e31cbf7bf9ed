-- Makes entries of a dead consumer wait again, and removes the consumer once it has none. It also removes the other keys that say
-- that the consumer serves. They lapse with its heartbeat, and may last longer if the server's clock was set back.
--
-- KEYS: those of lanes.lua; from 13 on the consumer's heartbeat, digests, room, serving, and the consumer's nudges and report.
-- ARGV: 1 to 5 as in sized.lua, where the consumer stands for the worker.
-- Answers how many entries it freed, or -1 if the consumer lives.
-- Loaded after lanes/moves.lua.
if redis.call('EXISTS', KEYS[13]) == 1 then return -1 end
redis.pcall('ZREM', KEYS[16], worker)
redis.call('XACK', KEYS[17], group, '0-1')  -- fails over junk, which DEL would remove
redis.call('DEL', KEYS[17])
redis.call('DEL', KEYS[18])  -- another selector of users.acl allows this key
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
