-- Whether `token` is the current holder's: no later one has written anything.
local function is_holder(progress, token)
  if redis.call('EXISTS', progress) == 0 then return false end
  if (tonumber(redis.call('HGET', progress, 'token')) or 0) > tonumber(token) then return false end
  redis.call('HSET', progress, 'token', token)
  return true
end
