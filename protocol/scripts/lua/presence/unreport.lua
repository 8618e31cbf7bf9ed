-- Withdraws the report of a worker that leaves.
--
-- KEYS: report, reports.
-- ARGV: worker.
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
