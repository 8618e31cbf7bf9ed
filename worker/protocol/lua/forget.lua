-- Marks a request whose reply has ended, once its entry has left the queue: so who sends its id again, after the reply has
-- expired, is told so at once. Another entry with that id is none of it.
local function forget(seen, left)
  local entry = redis.pcall('GET', seen)
  if type(entry) == 'string' and left[entry] then redis.call('SET', seen, '0-0', 'KEEPTTL') end
end
