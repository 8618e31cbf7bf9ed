-- Open tabs: a hash of "QUEUE ID" to "AT_ONCE TOKENS SECOND": its number of concurrent requests, the tokens charged so far
-- (`-`: none are counted), and the second in which it was opened.
local function tab_of(text)
  local at_once, tokens, second = string.match(text or '', '^(%d+) (%d+) (%d+)$')
  if not at_once then at_once, second = string.match(text or '', '^(%d+) %- (%d+)$') end
  return tonumber(at_once), tonumber(tokens), tonumber(second)
end

-- Returns the number of concurrent requests, whether one is the tab of request `id`, and the tokens charged in the last minute,
-- some of which may be given back. Fields that are not tabs, or older than `oldest_s`, are dropped.
local function open_tabs(key, now_ms, oldest_s, id)
  local sum, is_there, charged, flat = 0, false, 0, redis.call('HGETALL', key)
  for at = 1, #flat, 2 do
    local at_once, tokens, second = tab_of(flat[at + 1])
    if at_once and now_ms / 1000 - second < tonumber(oldest_s) then
      sum, is_there = sum + at_once, is_there or string.match(flat[at], ' (.*)$') == id
      if (second + 61) * 1000 > now_ms then charged = charged + (tokens or 0) end
    else
      redis.call('HDEL', key, flat[at])
    end
  end
  return sum, is_there, charged
end
