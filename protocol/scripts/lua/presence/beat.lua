-- Renews the heartbeat of a worker, and publishes whether it serves and with which model.
--
-- A key that holds another instance is left alone, so only one of two processes with the same name keeps running. `serving`
-- expires with its last member, so it exists as long as one of them lives. The card lasts as long, and belongs to a worker that
-- serves, if there is one. It states the time to live that it was set with, because a worker with a longer one may have set it.
--
-- KEYS: heartbeat, drain, serving, card, digests, the heartbeat of all workers with this model, homes, nudges, the heartbeat of
-- those of them that round alike, who these are (`alike`), lapses.
-- ARGV: instance; time to live (ms); worker; whether it serves; whether its model must match the card; digest; time to live of
-- such heartbeats (ms); then the card's fields and values.
-- Answers the drain mark, and in how many ms the last heartbeat of the queue lapses (0 if no worker serves it). If another
-- process has the name, it answers that instance, when its key expires, and the time. If the card belongs to another model, it
-- answers the card's worker, when the card expires, the time, the field that differs, its value there and its value here.
-- Loaded after shared/clock.lua, presence/cut.lua, shared/junk.lua, presence/members.lua and shared/homes.lua.
local instance, ttl, worker, is_serving, must_match, digest, model_ttl = unpack(ARGV, 1, 7)
local serving, card, digests, alike, lapses = KEYS[3], KEYS[4], KEYS[5], KEYS[10], KEYS[11]
local KNOWN = 3600000  -- ms for which it is known when a heartbeat lapsed
local holder = redis.call('GET', KEYS[1]) or ''
if holder ~= '' and holder ~= instance then
  cut(KEYS[1], holder, clock())
  local until_ms = redis.call('PEXPIRETIME', KEYS[1])
  if until_ms ~= -1 then return {holder, until_ms, clock()} end
  junk(KEYS[1])  -- a heartbeat always expires
end

local mine = {}
for i = 8, #ARGV, 2 do mine[ARGV[i]] = ARGV[i + 1] end
local compared = {
  'weights', 'tokenizer', 'template', 'chat_format', 'vocab_size', 'reading_rules', 'text_rules', 'generation_defaults',
  'logprobs_mode',
}
local theirs = redis.call('HMGET', card, 'worker', unpack(compared))
local author, left = theirs[1], redis.call('PTTL', card)
if not author and left ~= -2 then junk(card) end
left = math.max(0, left)
local longest = author and tonumber(redis.call('HMGET', card, 'ttl_ms')[1] or '')
if longest and longest > 0 and left > longest then
  left = longest
  redis.call('PEXPIRE', card, left)
end
if author and must_match == '1' and holder ~= instance then  -- the worker joins, or its heartbeat has lapsed
  for place, field in ipairs(compared) do
    local other, own = theirs[place + 1] or '', mine[field] or ''
    if other ~= own then return {author, redis.call('PEXPIRETIME', card), clock(), field, other, own} end
  end
end

redis.call('SET', KEYS[1], instance, 'PX', ttl)
left = string.format('%d', math.max(left, tonumber(ttl)))
redis.call('PEXPIRE', KEYS[8], ttl)
redis.call('ZADD', lapses, string.format('%d', clock() + ttl), worker)
redis.call('ZREMRANGEBYSCORE', lapses, '-inf', string.format('%d', clock() - KNOWN))
redis.call('PEXPIRE', lapses, string.format('%d', ttl + KNOWN))
if is_serving == '1' then
  local until_ms = redis.call('ZSCORE', serving, worker)
  enter(serving, worker, ttl)
  if not until_ms or tonumber(until_ms) <= clock() then move_in(KEYS[7], worker, redis.call('ZCARD', serving)) end
  redis.call('ZADD', alike, string.format('%d', clock() + ttl), worker)
  redis.call('ZREMRANGEBYSCORE', alike, '-inf', string.format('%d', clock()))
  redis.call('PEXPIRE', alike, left)
  redis.call('GET', KEYS[9])  -- fails over junk, which SET would replace
  redis.call('SET', KEYS[9], worker .. '/' .. model_ttl, 'PX', model_ttl)
else
  redis.call('ZREM', serving, worker)
  redis.call('ZREM', alike, worker)
end
if digest ~= '' then
  redis.call('HSET', digests, worker, digest)
  redis.call('PEXPIRE', digests, left)
  if is_serving == '1' then
    redis.call('GET', KEYS[6])
    redis.call('SET', KEYS[6], worker .. '/' .. model_ttl, 'PX', model_ttl)
  end
end
local is_mine = not author or author == worker or (is_serving == '1' and not redis.call('ZSCORE', serving, author))
if is_mine then
  redis.call('DEL', card)
  redis.call('HSET', card, unpack(ARGV, 8))
end
if is_mine or left == ttl then  -- otherwise another worker has set it for longer
  redis.call('HSET', card, 'ttl_ms', left)
  redis.call('PEXPIRE', card, left)
end
return {redis.call('GET', KEYS[2]) or '', redis.call('EXISTS', serving) * left}
