-- Tabs that are open: a hash of "QUEUE ID" to "AT_ONCE TOKENS SECOND": how much of the requests at once it takes, the tokens that
-- it was charged so far (`-`: none are counted), the second in which it was opened.
local function tab_of(text)
  local at_once, tokens, second = string.match(text or '', '^(%d+) (%d+) (%d+)$')
  if not at_once then at_once, second = string.match(text or '', '^(%d+) %- (%d+)$') end
  return tonumber(at_once), tonumber(tokens), tonumber(second)
end

-- How much they take of the requests at once, whether one is the tab of request `id`, and how many tokens of the last minute they
-- were charged, some of which may be given back. What is no tab, or older than `oldest_s`, is dropped.
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
