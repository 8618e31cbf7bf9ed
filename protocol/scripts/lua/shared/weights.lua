-- Returns the weight of a tenant from the text that somebody set, if any. It is 1 if that is not a weight.
local function valid_weight(text)
  local weight = tonumber(text or 1)
  return weight and weight > 0 and weight < math.huge and weight or 1
end
