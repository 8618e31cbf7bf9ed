-- After clock.lua, cut.lua, members.lua and homes.lua. KEYS: heartbeat, drain, serving, card, digests, heartbeat of those with this
-- model, homes, nudges.
--
-- A key that holds another instance is left alone, so of two processes with one name only one keeps running. The key of
-- those that serve expires with its last member, so it exists as long as one of them lives; so does the card, which is
-- always that of one that serves, if any does. The card says itself what time to live it was set with, as workers with longer
-- ones may have set it. Answers the drain mark, and in how many ms the last heartbeat of the queue lapses; 0 if nobody serves it.
local instance, ttl, worker, is_serving, must_match, digest, model_ttl = unpack(ARGV, 1, 7)
local serving, card, digests = KEYS[3], KEYS[4], KEYS[5]
local function read(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and value or ''  -- what is no string is none of ours
end
local holder = read(KEYS[1])
if holder ~= '' and holder ~= instance then
  cut(KEYS[1], holder)
  return {holder, redis.call('PEXPIRETIME', KEYS[1]), clock()}
end

local mine = {}
for i = 8, #ARGV, 2 do mine[ARGV[i]] = ARGV[i + 1] end
local compared = {'weights', 'tokenizer', 'template', 'chat_format', 'vocab_size'}
local theirs = redis.pcall('HMGET', card, 'worker', unpack(compared))
if theirs.err then  -- somebody wrote something else here
  redis.call('DEL', card)
  theirs = {}
end
local author, left = theirs[1], math.max(0, redis.call('PTTL', card))
local longest = author and tonumber(redis.call('HMGET', card, 'ttl_ms')[1] or '')
if longest and longest > 0 and left > longest then
  left = longest
  redis.call('PEXPIRE', card, left)
end
if author and must_match == '1' and holder ~= instance then  -- it joins, or its key has lapsed
  for place, field in ipairs(compared) do
    local other, own = theirs[place + 1] or '', mine[field] or ''
    if other ~= own then return {author, redis.call('PEXPIRETIME', card), clock(), field, other, own} end
  end
end

redis.call('SET', KEYS[1], instance, 'PX', ttl)
left = string.format('%d', math.max(left, tonumber(ttl)))
redis.call('PEXPIRE', KEYS[8], ttl)
if is_serving == '1' then
  local until_ms = redis.pcall('ZSCORE', serving, worker)
  enter(serving, worker, ttl)
  if type(until_ms) ~= 'string' or tonumber(until_ms) <= clock() then move_in(KEYS[7], worker, redis.call('ZCARD', serving)) end
else
  redis.pcall('ZREM', serving, worker)
end
if digest ~= '' then
  if type(redis.pcall('HSET', digests, worker, digest)) ~= 'number' then  -- somebody wrote something else here
    redis.call('DEL', digests)
    redis.call('HSET', digests, worker, digest)
  end
  redis.call('PEXPIRE', digests, left)
  if is_serving == '1' then redis.call('SET', KEYS[6], worker .. '/' .. model_ttl, 'PX', model_ttl) end
end
local is_mine = not author or author == worker or (is_serving == '1' and not redis.call('ZSCORE', serving, author))
if is_mine then
  redis.call('DEL', card)
  redis.call('HSET', card, unpack(ARGV, 8))
end
if is_mine or left == ttl then  -- else somebody has set it for longer
  redis.call('HSET', card, 'ttl_ms', left)
  redis.call('PEXPIRE', card, left)
end
return {read(KEYS[2]), redis.call('EXISTS', serving) * left}
