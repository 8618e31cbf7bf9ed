local MOST_DIGITS = 15  -- of a count: more, and it is none
local state, reply, cancel = KEYS[1], KEYS[2], KEYS[3]
local entry, worker, instance, ttl, gone, leap, max_epoch, tenant, digest, any_model, timeout, only_over = unpack(ARGV)
local counted = {'claimed_ms', 'attempts', 'crashes', 'strikes', 'handbacks'}
local s = redis.call('HMGET', state, 'status', 'entry', 'epoch', 'instance', 'digest', 'begun', 'worker', unpack(counted))
local status, owner_entry, owner_epoch, owner_instance, begun_with, begun, owner = unpack(s)
if status == 'dead' and owner_entry == entry then return {'dead'} end
if status == 'done' or status == 'dead' then return {'done'} end
for i = 1, #counted do
  local count = s[7 + i]
  if count and not (string.match(count, '^%d+$') and #count <= MOST_DIGITS) then return {'junk', counted[i]} end
end
if owner_entry and owner_entry ~= entry and owner_entry ~= gone then return {'duplicate', owner_entry} end
max_epoch = tonumber(max_epoch)
local highest, progress = tonumber(owner_epoch or 0), false
if not highest or highest ~= highest or highest < 0 or highest > max_epoch then highest = 0 end
local before = highest
local last = redis.call('XREVRANGE', reply, '+', '-', 'COUNT', 1)[1]
if last then
  local kind
  for i = 1, #last[2], 2 do
    if last[2][i] == 'type' then kind = last[2][i + 1] end
  end
  if kind == 'end' then return {'done'} end
  local last_epoch = tonumber(string.match(last[1], '^%d+'))
  if last_epoch > max_epoch then return {'unwritable'} end
  progress = kind == 'chunk' and last_epoch == highest
  begun = begun or kind == 'chunk'
  highest = math.max(highest, last_epoch)
end
local is_of_other = begun and begun_with and digest ~= '' and digest ~= begun_with
local time, is_cancelled = redis.call('TIME'), redis.call('EXISTS', cancel)
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local is_over = is_cancelled == 1 or (timeout ~= '' and now - string.match(entry, '^%d+') >= tonumber(timeout))
if only_over == '1' and not is_over then return {'goes_on'} end
if is_of_other and any_model ~= '1' and not is_over then return {'other_model', begun_with} end  -- any may end it
local epoch = time[1] * 1000000 + time[2]
if epoch <= highest then epoch = math.floor(highest) + 1 + leap end
epoch = string.format('%d', epoch)
local attempt = string.format('%d', (s[9] or 0) + 1)
local own = {'type', 'own', 'worker', worker, 'epoch', epoch, 'turn', attempt}
if digest ~= '' then own[9], own[10] = 'digest', digest end
redis.call('XADD', reply, epoch .. '-0', unpack(own))
if status == 'running' and owner_instance ~= instance then
  redis.call('HINCRBY', state, 'crashes', 1)
  if progress then
    redis.call('HSET', state, 'strikes', 1)
  else
    redis.call('HINCRBY', state, 'strikes', 1)
  end
end
redis.call('HSET', state, 'status', 'running', 'entry', entry, 'epoch', epoch, 'worker', worker,
  'instance', instance, 'attempts', attempt)
if begun then redis.call('HSET', state, 'begun', 1) end
if digest ~= '' and not is_of_other then redis.call('HSET', state, 'digest', digest) end
if tenant ~= '' then redis.call('HSET', state, 'tenant', tenant) end
redis.call('HSETNX', state, 'claimed_ms', string.format('%d', now))
redis.call('PEXPIRE', state, ttl)
redis.call('PEXPIRE', reply, ttl)
local answer = {'ok', tonumber(epoch), last and 1 or 0, is_cancelled, now}
local counts = redis.call('HMGET', state, unpack(counted))
for i = 1, #counts do answer[i + 5] = tonumber(counts[i] or 0) end
answer[#answer + 1] = is_of_other and 1 or 0
answer[#answer + 1] = before
answer[#answer + 1] = owner or ''
answer[#answer + 1] = status == 'running' and 1 or 0
return answer
