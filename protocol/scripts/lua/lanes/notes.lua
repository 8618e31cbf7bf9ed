-- Notes which entries wait from this run on: when they are due, and under which id they can be cancelled.
--
-- `note` only adds to `newly`; `keep_notes`, which a script calls once in the end, writes `named`, `due` and `asked`.
-- Loaded after lanes/lanes.lua.
local ACTS = 4  -- times that one cancellation can end a wait
local newly = {}  -- entries that wait from this run on, and their places; this run may give out some of them
-- Notes that an entry waits.
local function note(entry, found) newly[#newly + 1], newly[#newly + 2] = entry, found end

-- Ends the wait of entries that somebody asked to cancel. A noted cancellation does not prove that the flag is set, which is in
-- another slot. So it acts a few times and no more; the fraction of its score counts them.
local function end_asked(waits, ids)
  for i, score in ipairs(redis.call('ZMSCORE', asked, unpack(ids))) do
    if score then
      redis.call('ZADD', due, 0, waits[i])
      if tonumber(score) % 1 < (ACTS - 1) / ACTS then
        redis.call('ZINCRBY', asked, 1 / ACTS, ids[i])
      else
        redis.call('ZREM', asked, ids[i])
      end
    end
  end
end

-- Writes what `note` has noted, except for entries that this run has given out.
local function keep_notes()
  local waits, ids, names, expiring = {}, {}, {}, {}
  for i = 1, #newly, 2 do
    local entry, found = newly[i], newly[i + 1]
    if not found.is_taken then
      waits[#waits + 1], ids[#ids + 1] = entry, found.id or entry
      if found.id then names[#names + 1], names[#names + 2] = found.id, entry end
      if found.expires then expiring[#expiring + 1], expiring[#expiring + 2] = found.expires, entry end
    end
  end
  newly = {}
  if #waits == 0 then return end
  if #names > 0 then redis.call('HSET', named, unpack(names)) end
  if #expiring > 0 then redis.call('ZADD', due, unpack(expiring)) end
  if redis.call('EXISTS', asked) == 1 then end_asked(waits, ids) end
end
