-- Gives up a name that reserve.lua has reserved.
--
-- KEYS: starting.
-- ARGV: instance.
-- Answers 1, or 0 if the name was not reserved for that instance.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
