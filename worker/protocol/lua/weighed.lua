-- Entries are handed out as {id, bytes, whether all its fields are here, fields}, until they have `most` bytes together.
local group, worker, count, limit, most = unpack(ARGV, 1, 5)
local found, bytes = {}, 0
limit, most = tonumber(limit), tonumber(most)
local function hand_out(id, fields)
  local size, kept = 0, {}
  for i = 1, #fields do size = size + #fields[i] end
  bytes = bytes + size
  if size <= limit then
    found[#found + 1] = {id, size, 1, fields}
    return bytes < most
  end
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then kept = {'id', string.sub(fields[i + 1], 1, 256)} end
  end
  found[#found + 1] = {id, size, 0, kept}
  return bytes < most
end
