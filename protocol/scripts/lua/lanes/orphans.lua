-- Notes which entries lost their worker and when. For a while such an entry may be left to workers that round alike.
--
-- An entry that set_aside.lua has left to them only for a while is in `orphaned` too; one that is left to them for longer is not.
-- Loaded after shared/clock.lua and lanes/moves.lua.
local FREED = 64  -- entries that one run frees

-- Notes that entries have no worker since then (ms).
local function note_orphans(entries, since)
  local noted = {}
  for i, entry in ipairs(entries) do noted[2 * i - 1], noted[2 * i] = string.format('%d', since), entry end
  if #noted > 0 then redis.call('ZADD', orphaned, unpack(noted)) end
end

-- Makes entries wait for any worker once they have had none for `wait` ms. It takes no note of a time later than now, which dates
-- from before the server's clock was set back. Returns in how many ms the next entry has waited for so long, or nil.
local function free_orphans(wait)
  local now, over = clock(), nil
  over = redis.call('ZRANGEBYSCORE', orphaned, '-inf', string.format('%d', now - wait), 'LIMIT', 0, FREED)
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', orphaned, string.format('(%d', now), '+inf', 'LIMIT', 0, FREED)) do
    over[#over + 1] = entry
  end
  for _, entry in ipairs(over) do
    local holder = holder_of(entry)
    if holder ~= WAITING and is_held(holder) then
      local found = place_known(entry, redis.call('HGET', charged, entry))
      if found then redis.call('ZREM', aside_of .. string.sub(holder, #ASIDE + 1), found.member) end
      put_back(entry, found, true)
    end
    redis.call('ZREM', orphaned, entry)
  end
  local first = redis.call('ZRANGE', orphaned, 0, 0, 'WITHSCORES')[2]
  return first and math.max(1, tonumber(first) + wait - now) or nil
end
