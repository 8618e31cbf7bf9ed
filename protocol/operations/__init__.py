"""Operators' view of a queue and actions on it: workers, waiting and running requests, dead letters. For the role
`operator`.

`collector` takes a look, `snapshot` is the result, `reports` is what workers say of themselves. `requests` looks up one
request, `waiting` lists those that wait. `draining` and `dead_letters` hold the actions. `penstock top`, `penstock
requests`, `penstock workers` and the gateway's page for operators are built on them.
"""
