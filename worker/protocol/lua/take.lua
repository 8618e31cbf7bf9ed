-- After weighed.lua. KEYS: requests.
for _ = 1, count do
  local answer = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', 1, 'STREAMS', KEYS[1], '>')
  if not answer or not hand_out(answer[1][2][1][1], answer[1][2][1][2]) then break end
end
return found
