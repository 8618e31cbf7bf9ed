-- Collects entries for an answer, until they have `most` bytes.
--
-- ARGV: group; worker; how many entries at most; the bytes above which an entry goes without its fields; the bytes of all
-- entries.
-- An answer holds {id, bytes, whether all its fields are here, fields} of each entry.
local group, worker, count, limit, most = unpack(ARGV, 1, 5)
local found, bytes = {}, 0
limit, most = tonumber(limit), tonumber(most)
local function add(id, fields, known)
  local size, kept = known or 0, {}
  if not known then
    for i = 1, #fields do size = size + #fields[i] end
  end
  bytes = bytes + size
  if size <= limit then
    found[#found + 1] = {id, size, 1, fields}
    return bytes < most
  end
  for i = 1, #fields, 2 do  -- they say who is to be told: only calls have `to`
    if fields[i] == 'id' or fields[i] == 'to' then
      local place = fields[i] == 'id' and 1 or 3
      kept[place], kept[place + 1] = fields[i], string.sub(fields[i + 1], 1, 256)
    end
  end
  if not kept[1] then kept = {kept[3], kept[4]} end
  found[#found + 1] = {id, size, 0, kept}
  return bytes < most
end
