"""The measuring side of `penstock bench`: requests, arrival times, what is recorded for each, and the report.

`on_engine` drives an engine in this process, `on_service` sends through Redis; both share the rest.
"""
