"""Runs the whole service on one machine, and needs no other service: for scripts, demos, benchmarks and tests.

`llm` is the engine without a queue (`penstock.LLM`). `embedded` starts a server of its own, `worker_process` and
`gateway_process` start the programs, and `progress` shows people how far one of these is.

Nothing that serves others may depend on this folder.
"""
