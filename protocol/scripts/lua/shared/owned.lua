-- Returns whether an entry is pending for a worker. XACK and XCLAIM do not check that by themselves: a worker that was frozen
-- would acknowledge its successor's entry.
local function owned(requests, group, worker, entry)
  return #redis.call('XPENDING', requests, group, entry, entry, 1, worker) == 1
end
