-- Takes out entries that need not run any more, because their time is over or somebody asked to cancel them. It also gives places
-- to new entries, and to those that workers of an earlier version gave back.
--
-- A cancellation stays noted after it was looked at: its entry may have no place yet, or give way just now, or its worker, which
-- would have seen the flag, may die.
--
-- KEYS: those of lanes.lua; from 14 on cancelled, and the prefix of seen.
-- ARGV: 1 to 5 as in sized.lua; 6: as in take.lua; 7: how many cancellations it looks at.
-- Answers the entries, whether there are more new ones, and whether there is more to look at.
-- Loaded after shared/clock.lua and lanes/arrivals.lua.
local cancelled, seen_of = KEYS[14], KEYS[15]
local KEPT = 3600000  -- ms that a cancellation stays noted, while others come
local MOST_KEPT = 1000000
count = tonumber(count)
local has_new, now = lane_new(tonumber(ARGV[6])), clock()
local _, has_more = put_back_all(UNOWNED, count)

-- Takes the next cancellations, which are ids of requests. An invalid id belongs to no request. Returns the ids, and whether
-- there may be more.
local function pop_wishes(limit)
  local wishes, bytes = {}, 0
  for popped = 1, limit do
    local id = bytes < most and redis.call('SPOP', cancelled)
    if not id then return wishes, bytes >= most end
    bytes = bytes + #id
    if name_of(id) ~= '' then wishes[#wishes + 1] = id end
  end
  return wishes, true
end

local function look_at_wishes()
  if redis.call('EXISTS', cancelled) == 0 then return false end
  redis.call('HLEN', named)  -- fails over junk in these keys before it takes an id that it could not note
  redis.call('ZCARD', due)
  redis.call('ZREMRANGEBYSCORE', asked, '-inf', string.format('%d', now - KEPT))
  local wishes, are_more = pop_wishes(tonumber(ARGV[7]))
  if #wishes == 0 then return are_more end
  local kept = {}
  for i, entry in ipairs(redis.call('HMGET', named, unpack(wishes))) do
    local id = wishes[i]
    local seen = not entry and redis.pcall('GET', seen_of .. id)  -- an earlier version gave it its place, or it has no id
    entry = entry or type(seen) == 'string' and seen or id
    if is_held(holder_of(entry)) then redis.call('ZADD', due, 0, entry) end
    kept[2 * i - 1], kept[2 * i] = string.format('%d', now), id
  end
  redis.call('ZADD', asked, unpack(kept))
  redis.call('ZREMRANGEBYRANK', asked, 0, -MOST_KEPT - 1)
  redis.call('PEXPIRE', asked, 24 * KEPT)
  return are_more
end

keep_notes()
has_more = look_at_wishes() or has_more
local over, has_room, is_there = redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, count), true, nil
for i, entry in ipairs(over) do
  if not has_room then break end
  is_there, has_room = take_held(entry)
  if not is_there then redis.call('ZREM', due, entry) end  -- a worker has it, or it was deleted
end
keep_counts()
return {found, has_new and 1 or 0, (has_more or not has_room or #over == count) and 1 or 0}
