-- Marks a request whose reply has ended, once its entry has left the queue: so who sends its id again, after the reply has
-- expired, is told so at once. Another entry with that id is none of it. One call does it for nearly all: what is not to be
-- marked gets back what it held.
local function forget(seen, left)
  local entry = redis.pcall('SET', seen, '0-0', 'XX', 'KEEPTTL', 'GET')
  if type(entry) == 'string' and not left[entry] then redis.call('SET', seen, entry, 'KEEPTTL') end
end
