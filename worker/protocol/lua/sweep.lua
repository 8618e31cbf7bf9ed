-- After lanes.lua. KEYS[10], KEYS[11]: cancelled; seen, without an id. ARGV[6]: as of take.lua. Answers entries, and whether
-- there are more new ones.
--
-- Takes out what need not be run any more: entries whose time is over, and those somebody asked to cancel.
local cancelled, seen_of = KEYS[10], KEYS[11]
local has_more = lane_new(tonumber(ARGV[6]))
count = tonumber(count)
local has_room, now = true, clock()
local function sweep(entry)
  local claimed = claim({entry})[1]
  if claimed then
    has_room = take_out(entry, claimed[2])
  else  -- somebody has it, or it was deleted
    redis.call('ZREM', due, entry)
  end
end
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, count)) do
  if not has_room then break end
  sweep(entry)
end
while not has_more and has_room and #found < count do  -- what is new has no place yet
  local id = redis.call('SPOP', cancelled)
  if not id then break end
  local entry = redis.call('GET', seen_of .. id) or string.match(id, '^%d+%-%d+$')
  if entry then sweep(entry) end
end
keep_counts()
return {found, has_more and 1 or 0}
