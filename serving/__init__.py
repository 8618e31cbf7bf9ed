"""What every server of the project needs, whether a worker's port or a gateway.

Readiness, metrics and their export, log lines, the guard of a port, and fields of settings. Nothing here knows what is
served: no requests, no models, no routes of an API. A worker's routes are in `worker.health`, a gateway's in `gateway`.
"""
