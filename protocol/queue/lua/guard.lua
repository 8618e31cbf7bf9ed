-- Wraps a script that failed over what a key holds. It runs again here, and the key is found. If its value may be set aside,
-- the key gets another name, and the script continues as if it had not existed.
--
-- The code before it defines `script`, which is that script; STAYS, the names within a queue or a slot of keys that are never
-- set aside, or nil if none may be; and SHAPES, pairs of patterns for names and for what such a key can hold.
--
-- Returns what was set aside, as pairs of names; a key in the way that stays (or false); and the script's answer.
local MOST = 64  -- names under which one key's values can be set aside
local AT_ONCE = 16  -- keys that one run sets aside
local moved, in_the_way, reads = {}, nil, {}

local function spelled(key)
  return (string.gsub(key, '[^%w_.:{}/@-]', function(char) return string.format('%%%02X', string.byte(char)) end))
end

-- Returns the name under which a key is set aside, or nil. The keys of a request have none: the request ends instead.
local function place_for(key)
  if not STAYS or #moved >= 2 * AT_ONCE then return nil end
  local slot, name = string.match(key, '^(penstock:{[^{}]+}:)(.+)$')
  if not slot then slot, name = string.match(key, '^(penstock:gateway:{[^{}]+}:)(.+)$') end
  if not slot and key == 'penstock:queues' then slot, name = '{penstock:queues}:', 'all' end  -- in a slot of its own
  if not slot or STAYS[name] or string.find(name, '^junk:') then return nil end
  return slot .. 'junk:' .. name
end

local function set_aside(key)
  local place = place_for(key)
  for number = 1, place and MOST or 0 do
    local to = number == 1 and place or place .. '/' .. number
    local answer = server_call('RENAMENX', key, to)
    if answer == 1 then
      moved[#moved + 1], moved[#moved + 2] = spelled(key), spelled(to)
      return true
    end
    if answer ~= 0 then break end  -- this user may not
  end
  in_the_way = in_the_way or spelled(key)
  return false
end

local function key_of(arguments)
  local name = string.upper(arguments[1])
  if name == 'XGROUP' or name == 'XINFO' then return arguments[3] end
  for i = 2, string.find(name, '^XREAD') and #arguments or 0 do
    if string.upper(arguments[i]) == 'STREAMS' then return arguments[i + 1] end
  end
  return arguments[2]
end

-- Whether a command was refused for the key's content, and not for its arguments.
local function is_about_the_value(why, name)
  return string.find(why, 'WRONGTYPE', 1, true) or string.find(why, 'hash value is not', 1, true)
    or string.find(why, 'would overflow', 1, true) or string.find(why, 'resulting score is not', 1, true)
    or string.find(why, 'exhausted the last possible', 1, true)
    or string.find(name, '^[Ii][Nn][Cc][Rr]') and string.find(why, 'value is not an integer', 1, true)
end

function redis.junk(key)
  if not set_aside(key) then error({err = 'JUNK ' .. spelled(key)}) end
end

function redis.call(...)
  local arguments = {...}
  local answer = server_call(...)
  local why = type(answer) == 'table' and answer.err
  if not why then
    reads[#reads + 1] = {arguments, answer}
    return answer
  end
  if not is_about_the_value(why, arguments[1]) then error(answer) end
  redis.junk(key_of(arguments))
  return redis.call(...)
end

-- Whether such a key can hold everything that was read: members without their scores, which are numbers.
local function fits(arguments, answer, shape)
  if type(answer) ~= 'table' then return type(answer) ~= 'string' or string.find(answer, shape) ~= nil end
  local step = string.upper(arguments[#arguments]) == 'WITHSCORES' and 2 or 1
  for i = 1, #answer, step do
    if type(answer[i]) == 'string' and not string.find(answer[i], shape) then return false end
  end
  return true
end

-- Returns the last key that was read and held what such a key never does, or nil.
local function misread()
  for i = #reads, 1, -1 do
    local arguments, answer = reads[i][1], reads[i][2]
    local key, is_score = key_of(arguments), string.find(arguments[1], '^ZM?SCORE$')
    for at = 1, key and not is_score and #SHAPES or 0, 2 do
      if string.find(key, SHAPES[at]) and not fits(arguments, answer, SHAPES[at + 1]) then return key end
    end
  end
end

while true do
  reads = {}
  local is_done, answer = pcall(script)
  if is_done then return {moved, false, answer or false} end
  if in_the_way then return {moved, in_the_way, false} end
  local key = misread()
  if not key then return type(answer) == 'table' and answer or redis.error_reply(answer) end
  if not set_aside(key) then return {moved, in_the_way, false} end
end
