"""What all sides agree on in Redis: producers, gateways, workers and operators. The ground floor.

`keys` names every key, and `key_table` says what each holds and who may do what with it. `wire` has the schema of
requests, replies, calls and cards. `redis` connects to a server, a cluster or sentinels, and tells faults apart.
`scripts` are the workers' Lua scripts, by noun; `queue` has those of clients, and `operations` what operators read and
do. `telemetry` has the names of spans and metrics.

Nothing here imports another package of the project, except the few modules of `penstock` itself that all share, nor
JAX or an HTTP library. What one side alone does with an answer (when a worker retries, how a client assembles a reply,
which status a gateway returns) belongs to that side.
"""
