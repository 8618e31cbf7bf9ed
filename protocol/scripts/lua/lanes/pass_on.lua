-- Makes an entry that this worker read past the lanes wait again, if it should go to another worker: it is at home with another,
-- this worker has no capacity, or it takes only higher priorities.
--
-- KEYS: as in take.lua.
-- ARGV: 1 to 5 as in sized.lua; 6: the entry; 7: the lowest priority that this worker takes; 8: how many more sequences it has
-- capacity for; 9: for how long (ms) an entry is left to its home.
-- Answers whether the entry waits for others now.
-- Loaded after shared/owned.lua, shared/homes.lua and lanes/moves.lua.
local homes, room, serving, nudge_of = unpack(KEYS, 14, 17)
local entry, lowest, free = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local item = redis.call('XRANGE', requests, entry, entry)[1]
if not item or not owned(requests, group, worker, entry) then return 0 end
local found, now = place(entry, item[2]), clock()

-- Returns the home of the entry, if the entry is left to it, and whether that home has capacity.
local function at_home()
  local name = found.slot and home_of(homes, serving, found.slot, redis.call('HGET', homes, found.slot))
  if not name or name == worker then return end
  local has_room = tonumber(redis.call('ZSCORE', room, name) or 0) > 0
  if has_room or left_to_full(entry, found.size, now, tonumber(ARGV[9])) > 0 then return name, has_room end
end

local function with_room()
  for _, name in ipairs(redis.call('ZRANGE', room, '+inf', '(0', 'BYSCORE', 'REV', 'LIMIT', 0, 8)) do
    local until_ms = redis.call('ZSCORE', serving, name)
    if name ~= worker and until_ms and tonumber(until_ms) > now then return name end
  end
end

local owner, has_room = at_home()
local other = owner or (free == 0 and with_room()) or nil
if not other and found.priority >= lowest then return 0 end
put_back(entry, found, false)
keep_notes()
keep_counts()
if has_room then redis.call('ZADD', passed, 'LT', number(now), entry) end
if other and (has_room or not owner) then nudge(nudge_of, other) end
return 1
