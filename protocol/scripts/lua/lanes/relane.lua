-- Gives waiting entries their places again, after a key of the lanes was set aside. An entry that has a place keeps it.
--
-- KEYS: those of lanes.lua.
-- ARGV: 1 to 5 as in sized.lua; 6: the entry to go on after.
-- Answers the entry that the next run is to go on after, or nil once all were looked at.
-- Loaded after shared/sized.lua, lanes/places.lua, lanes/seats.lua and lanes/notes.lua.
local page = redis.call('XPENDING', requests, group, '(' .. ARGV[6], '+', count, WAITING)
local entries, last = {}, nil
for i, item in ipairs(page) do entries[i] = item[1] end

-- Puts a tenant into the band of its next entry, whatever became of that band.
local function seat_again(tenant, before)
  local now = priority_next(tenant)
  if before and before ~= now and redis.call('ZSCORE', band_of .. before, tenant) then return seat(tenant, before, now) end
  if not redis.call('ZSCORE', band_of .. now, tenant) then return seat(tenant, nil, now) end
  redis.call('ZADD', bands, now, now)
end

for i, text in ipairs(#entries > 0 and redis.call('HMGET', charged, unpack(entries)) or {}) do
  if bytes_read >= most then break end
  local found = place_known(entries[i], text)
  if found then
    local before = priority_next(found.tenant)
    redis.call('ZADD', lane_of .. found.tenant, 'NX', found.rank, found.member)
    seat_again(found.tenant, before)
    note(entries[i], found)
  end
  last = entries[i]
end
keep_notes()
return (#page == tonumber(count) or last ~= entries[#entries]) and last or false
