-- Replaces a request stream that takes no new entries any more by one with the same entries; docs/security.md says when.
--
--   redis-cli --user admin --askpass --eval renew_queue.lua 'penstock:{QUEUE}:requests'
--
-- One step on the server: no entry is lost and none is added in between. Workers read all entries again, and go on with
-- each request where its reply ends. An entry that is dated after the server's clock gets an id of the current time.
local queue, fresh = KEYS[1], KEYS[1] .. ':fresh'
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('DEL', fresh)
redis.call('XGROUP', 'CREATE', fresh, 'workers', '0', 'MKSTREAM')
local count, start = 0, '-'
while true do
  local page = redis.call('XRANGE', queue, start, '+', 'COUNT', 100)
  if #page == 0 then break end
  for _, entry in ipairs(page) do
    local id, fields = entry[1], entry[2]
    if #fields > 1000 then fields = {'fields', tostring(#fields / 2)} end -- no request; Lua could not pass them on
    if tonumber(string.match(id, '^%d+')) > now_ms then id = '*' end
    redis.call('XADD', fresh, id, unpack(fields))
    count = count + 1
  end
  start = '(' .. page[#page][1]
  if start == '(18446744073709551615-18446744073709551615' then break end -- the server knows nothing above it
end
redis.call('RENAME', fresh, queue)
return count
