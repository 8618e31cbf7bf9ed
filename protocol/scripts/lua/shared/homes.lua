-- Chooses the home of prompts that begin alike, which is one worker.
--
-- The home is the serving worker that has the highest weight for their slot (rendezvous hashing, Thaler and Ravishankar, 1998),
-- unless it has its share of slots already (bounded loads, Mirrokni, Thorup and Zadimoghaddam, 2018). So few beginnings are
-- spread as well as many. A worker that comes or goes moves its own slots, and no others.
--
-- KEYS: the caller passes homes, which holds the slots that were asked for, serving, and the prefix of nudges.
-- Loaded after shared/clock.lua.
local PRIME = 2 ^ 26 - 5
local SHARE = 1.25  -- the most slots that one worker has, over the mean
local BYTES_PER_MS = 40  -- the speed at which prompts are computed, some 10,000 tokens in a second
local numbers = {}

local function weight_of(slot, name)
  numbers[name] = numbers[name] or tonumber(string.sub(redis.sha1hex(name), 1, 6), 16) + 1
  return numbers[name] * (104729 + 7919 * slot) % PRIME
end

local function share_of(slots, workers) return math.ceil(SHARE * slots / workers) end

-- Gives a worker that begins to serve the slots that are its own now. `workers` counts it too.
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

-- Returns the worker with the highest weight that does not have its share yet.
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

-- Returns the worker that has the slot, or nil if none serves. A worker that no longer serves has none.
local function home_of(homes, serving, slot, name)
  local now = clock()
  local until_ms = name and redis.call('ZSCORE', serving, name)
  if until_ms and tonumber(until_ms) > now then return name end
  local best = settle(homes, slot, redis.call('ZRANGEBYSCORE', serving, string.format('(%d', now), '+inf'))
  if best then redis.call('HSET', homes, slot, best) end
  return best
end

-- Returns for how long (ms) an entry is still left to a home that is full. It waits there no longer, from when it came, than its
-- prompt takes to compute elsewhere; so this costs nothing if more waits than can be run. An entry that has an id later than now
-- is not left: it was dated before the server's clock was set back, or it follows one that was.
local function left_to_full(entry, size, now, most)
  local since = now - string.match(entry, '^%d+')
  return since < 0 and 0 or math.min(most, size / BYTES_PER_MS) - since
end

-- Wakes a worker that waits for new entries, so that it looks again whose turn it is.
local function nudge(nudge_of, name) redis.call('XADD', nudge_of .. name, 'NOMKSTREAM', 'MAXLEN', 1, '*', 'look', 'again') end
