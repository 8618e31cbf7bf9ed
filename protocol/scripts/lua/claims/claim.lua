-- Claims a request for a worker. It writes a higher epoch to the reply and to the state, so Redis refuses what earlier owners
-- write.
--
-- KEYS: state, reply, cancel.
-- ARGV: entry; worker; instance; time to live of state and reply (ms); another entry of this request that is known to be gone;
-- how far an epoch leaps; the highest epoch; tenant; digest; whether to claim a reply that another model began; timeout (ms after
-- the enqueue, or ''); whether to claim only a request that is over or cancelled; arithmetic, or ''; whether to 'continue' or to
-- 'end' a reply that another arithmetic began, or ''.
-- Answers 'ok' and what `parse_claim` reads; or why the request was not claimed: 'dead'; 'done'; 'junk' and the field;
-- 'duplicate' and the other entry; 'unwritable'; 'goes_on'; 'other_model' and its digest; 'other_arithmetic', the digest of its
-- model, and its arithmetic.
-- Loaded after shared/clock.lua.
local MOST_DIGITS = 15  -- a longer number is not a count
local state, reply, cancel = KEYS[1], KEYS[2], KEYS[3]
local entry, worker, instance, ttl, gone, leap, max_epoch, tenant, digest = unpack(ARGV, 1, 9)
local any_model, timeout, only_over, arithmetic, any_arithmetic = unpack(ARGV, 10, 14)
local counted = {'claimed_ms', 'attempts', 'crashes', 'strikes', 'handbacks'}
local texts = {'status', 'entry', 'epoch', 'instance', 'digest', 'begun', 'worker', 'arithmetic', 'inexact'}
local s, counts = redis.call('HMGET', state, unpack(texts)), redis.call('HMGET', state, unpack(counted))
local status, owner_entry, owner_epoch, owner_instance, begun_with, begun, owner, rounded_by, inexact = unpack(s)
if status == 'dead' and owner_entry == entry then return {'dead'} end
if status == 'done' or status == 'dead' then return {'done'} end
for i = 1, #counted do
  local count = counts[i]
  if count and not (string.match(count, '^%d+$') and #count <= MOST_DIGITS) then return {'junk', counted[i]} end
end
if owner_entry and owner_entry ~= entry and owner_entry ~= gone then return {'duplicate', owner_entry} end
max_epoch = tonumber(max_epoch)
local highest, progress = tonumber(owner_epoch or 0), false
if not highest or highest ~= highest or highest < 0 or highest > max_epoch then highest = 0 end
local before = highest
local last = redis.call('XREVRANGE', reply, '+', '-', 'COUNT', 1)[1]
if last then
  local kind, tells_prefill
  for i = 1, #last[2], 2 do
    if last[2][i] == 'type' then kind = last[2][i + 1] end
    tells_prefill = tells_prefill or last[2][i] == 'prefill_done'
  end
  if kind == 'end' then return {'done'} end
  -- No token of a claim precedes a chunk that tells how far its prefill is, and nothing of it outlives the worker.
  local has_tokens = kind == 'chunk' and not tells_prefill
  local last_epoch = tonumber(string.match(last[1], '^%d+'))
  if last_epoch > max_epoch then return {'unwritable'} end
  progress = has_tokens and last_epoch == highest
  begun = begun or has_tokens
  highest = math.max(highest, last_epoch)
end
local is_of_other_model = begun and begun_with and digest ~= '' and digest ~= begun_with
local differs = begun and not (is_of_other_model or inexact) and (rounded_by or '') ~= arithmetic
local epoch, is_cancelled = clock_us(), redis.call('EXISTS', cancel)
local now = math.floor(epoch / 1000)
local is_over = is_cancelled == 1 or (timeout ~= '' and now - string.match(entry, '^%d+') >= tonumber(timeout))
if only_over == '1' and not is_over then return {'goes_on'} end
if not is_over then  -- anyone may end what is over
  if is_of_other_model and any_model ~= '1' then return {'other_model', begun_with} end
  if differs and any_arithmetic == '' then return {'other_arithmetic', begun_with or '', rounded_by or ''} end
end
local only_ends = differs and (is_over or any_arithmetic == 'end')
local is_of_other = is_of_other_model or only_ends
if epoch <= highest then epoch = math.floor(highest) + 1 + leap end
epoch = string.format('%d', epoch)
local attempt = string.format('%d', (counts[2] or 0) + 1)
local is_exact = not (inexact or differs and not only_ends)
local own = {'type', 'own', 'worker', worker, 'epoch', epoch, 'turn', attempt}
local function say(field, value)
  own[#own + 1], own[#own + 2] = field, value
end
if digest ~= '' then say('digest', digest) end
if arithmetic ~= '' then say('arithmetic', arithmetic) end
if not is_exact then say('exact', 0) end
redis.call('XADD', reply, epoch .. '-0', unpack(own))
local known = {'status', 'running', 'entry', entry, 'epoch', epoch, 'worker', worker, 'instance', instance, 'attempts', attempt}
local function know(field, value)
  known[#known + 1], known[#known + 2] = field, value
end
local crashes, strikes = counts[3] or 0, counts[4] or 0
if status == 'running' and owner_instance ~= instance then
  crashes, strikes = crashes + 1, progress and 1 or strikes + 1
  know('crashes', string.format('%d', crashes))
  know('strikes', string.format('%d', strikes))
end
if begun then know('begun', 1) end
if digest ~= '' and not is_of_other then know('digest', digest) end
if (rounded_by or '') ~= arithmetic and not is_of_other then know('arithmetic', arithmetic) end
if not is_exact then know('inexact', 1) end
if tenant ~= '' then know('tenant', tenant) end
if not counts[1] then know('claimed_ms', string.format('%d', now)) end
redis.call('HSET', state, unpack(known))
redis.call('PEXPIRE', state, ttl)
redis.call('PEXPIRE', reply, ttl)
local answer = {'ok', tonumber(epoch), last and 1 or 0, is_cancelled, now}
for i, count in ipairs({counts[1] or now, attempt, crashes, strikes, counts[5] or 0}) do answer[i + 5] = tonumber(count) end
answer[#answer + 1] = is_of_other_model and 1 or only_ends and 2 or 0
answer[#answer + 1] = before
answer[#answer + 1] = owner or ''
answer[#answer + 1] = status == 'running' and 1 or 0
answer[#answer + 1] = is_exact and 1 or 0
return answer
