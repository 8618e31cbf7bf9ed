-- After clock.lua. Where prompts that begin alike go: to the worker, of those that serve, that has the highest weight for
-- their slot (rendezvous hashing, Thaler and Ravishankar, 1998), unless that has its share of slots already (bounded loads,
-- Mirrokni, Thorup and Zadimoghaddam, 2018): few beginnings are spread as well as many. Whoever comes or goes moves its own
-- slots, and no others. `homes` holds the slots that were asked for.
local PRIME = 2 ^ 26 - 5
local SHARE = 1.25  -- of slots, over the mean, that one worker has at most
local BYTES_PER_MS = 40  -- of prompts that are computed, some 10,000 tokens in a second
local numbers = {}

local function weight_of(slot, name)
  numbers[name] = numbers[name] or tonumber(string.sub(redis.sha1hex(name), 1, 6), 16) + 1
  return numbers[name] * (104729 + 7919 * slot) % PRIME
end

local function share_of(slots, workers) return math.ceil(SHARE * slots / workers) end

-- For one that begins to serve, as one of so many: the slots that are its own now.
local function move_in(homes, name, workers)
  local owners, won = redis.call('HGETALL', homes), {}
  local most = 2 * share_of(#owners / 2, workers)
  for i = 1, #owners, 2 do
    local slot = tonumber(owners[i])
    if slot and #won < most and weight_of(slot, name) > weight_of(slot, owners[i + 1]) then
      won[#won + 1], won[#won + 2] = slot, name
    end
  end
  if #won > 0 then redis.call('HSET', homes, unpack(won)) end
end

-- The worker of highest weight that has not its share.
local function settle(homes, slot, names)
  local owned, total, best = {}, 0, nil
  for _, name in ipairs(names) do owned[name] = 0 end
  for _, name in ipairs(redis.call('HVALS', homes)) do
    if owned[name] then owned[name], total = owned[name] + 1, total + 1 end
  end
  for _, name in ipairs(names) do
    local is_free = owned[name] < share_of(total + 1, #names)
    if is_free and (not best or weight_of(slot, name) > weight_of(slot, best)) then best = name end
  end
  return best
end

-- Who has the slot. One that does not serve any more has none.
local function home_of(homes, serving, slot, name)
  local now = clock()
  local until_ms = name and redis.call('ZSCORE', serving, name)
  if until_ms and tonumber(until_ms) > now then return name end
  local best = settle(homes, slot, redis.call('ZRANGEBYSCORE', serving, string.format('(%d', now), '+inf'))
  if best then redis.call('HSET', homes, slot, best) end
  return best
end

-- How long (ms) an entry, by its id and size, is left to a home that is full: from when it came, no longer than it takes to
-- compute its prompt elsewhere. So it costs nothing where more waits than can be run. One that came later than now, by its id, was
-- dated before the server's clock was set back, or is behind one that was: it is not left.
local function left_to_full(entry, size, now, most)
  local since = now - string.match(entry, '^%d+')
  return since < 0 and 0 or math.min(most, size / BYTES_PER_MS) - since
end

-- Wakes a worker that waits for new entries: it looks again whose turn it is.
local function nudge(nudge_of, name) redis.call('XADD', nudge_of .. name, 'NOMKSTREAM', 'MAXLEN', 1, '*', 'look', 'again') end
