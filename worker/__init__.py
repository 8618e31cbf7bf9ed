"""The worker: it takes requests from a queue, runs them in an engine, and delivers their tokens exactly once.

A request's way: `intake`, `run`, `publish`. Beside it, `watch` looks after cancels, accounts and reports, `calls`
answers questions about prompts, `presence` holds the worker's name, and `health` serves its port. `session` puts them
together for one connection to Redis, and `service` keeps sessions going for as long as the process lives.

What is said in Redis is in `penstock.protocol`; what happens on the device is in `penstock.engine`. Command lines and
processes on one machine are in `penstock.cli` and `penstock.local`, and nothing here imports them.
"""
