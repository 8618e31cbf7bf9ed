-- A window is a hash: second of the server's clock to its count. A second counts until all of it is more than a minute old,
-- so no 60 s in a row exceed the limit. Counts of future seconds, from before the clock was set back, move to the current one.
local function count_in(key, second, count)
  redis.call('HINCRBY', key, second, count)
  redis.call('EXPIRE', key, 62)
end

local function window(key, now_ms)
  local sum, seconds, flat, ahead = 0, {}, redis.call('HGETALL', key), 0
  for at = 1, #flat, 2 do
    local second, count = tonumber(flat[at]), tonumber(flat[at + 1])
    if (second + 61) * 1000 <= now_ms then
      redis.call('HDEL', key, flat[at])
    elseif second * 1000 > now_ms then
      redis.call('HDEL', key, flat[at])
      ahead = ahead + count
    else
      sum = sum + count
      seconds[#seconds + 1] = {(second + 61) * 1000 - now_ms, count}
    end
  end
  if ahead > 0 then
    local second = math.floor(now_ms / 1000)
    count_in(key, second, ahead)
    sum = sum + ahead
    seconds[#seconds + 1] = {(second + 61) * 1000 - now_ms, ahead}
  end
  table.sort(seconds, function(one, other) return one[1] < other[1] end)
  return sum, seconds
end

-- Returns the milliseconds until at least `count` of the window's total no longer counts.
local function until_free(seconds, count)
  local wait = 0
  for _, second in ipairs(seconds) do
    if count <= 0 then break end
    wait, count = second[1], count - second[2]
  end
  return wait
end

local function until_empty(seconds)
  return #seconds > 0 and seconds[#seconds][1] or 0
end
