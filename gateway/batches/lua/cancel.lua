-- KEYS: progress. Returns the status, which becomes `cancelling` if the batch still begins lines.
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', KEYS[1], 'status', 'cancelling', 'cancelling_at', redis.call('TIME')[1])
  return 'cancelling'
end
return status
