-- Gives new entries their places.
--
-- Reads new entries of `requests`, as WAITING, and keeps their places and fields in `bodies`. Writes the group, lanes and bands.
-- Loaded after lanes/moves.lua.
local SMALL, AT_A_TIME = 16384, 4  -- a script reads several entries at a time after entries of so few bytes, and how many
-- Gives up to `limit` new entries, or a few more, their places. Returns whether there may be more. It reads a few at a time,
-- because it cannot know how large they are.
local function lane_new(limit)
  local new, newcomers, of, read, last, has_more = {}, {}, {}, 0, SMALL + 1, true
  while #new < limit and read < most do
    local many = last <= SMALL and AT_A_TIME or 1
    local answer = redis.call('XREADGROUP', 'GROUP', group, WAITING, 'COUNT', many, 'STREAMS', requests, '>')
    if not answer then
      has_more = false
      break
    end
    last = 0
    for _, item in ipairs(answer[1][2]) do
      local found = place(item[1], item[2])
      found.fields, bodies[item[1]] = item[2], found
      local each = of[found.tenant]
      if not each then
        each = {name = found.tenant, priority = found.priority, ranked = {}}
        of[found.tenant], newcomers[#newcomers + 1] = each, each
      end
      each.ranked[#each.ranked + 1], each.ranked[#each.ranked + 2] = found.rank, found.member
      each.priority = math.max(each.priority, found.priority)
      tally(found.priority, 1, found.size)
      note(item[1], found)
      new[#new + 1], last = item[1], last + found.size
    end
    read = read + last
  end
  if #new == 0 then return has_more end
  new[#new + 1], new[#new + 2], new[#new + 3] = 'TIME', SINCE, 'JUSTID'
  redis.call('XCLAIM', requests, group, WAITING, 0, unpack(new))
  line_up(newcomers)
  return has_more
end
