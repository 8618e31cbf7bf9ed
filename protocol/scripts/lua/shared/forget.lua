-- Marks a request whose reply has ended, once its entry has left the queue. A client that sends its id again, after the reply has
-- expired, then learns that at once. Another entry with the id is not affected. One call is enough for nearly all requests; a
-- request that is not to be marked gets back what `seen` held.
local function forget(seen, left)
  local entry = redis.pcall('SET', seen, '0-0', 'XX', 'KEEPTTL', 'GET')
  if type(entry) == 'string' and not left[entry] then redis.call('SET', seen, entry, 'KEEPTTL') end
end
