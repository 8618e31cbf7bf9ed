"""What operators see of a queue, and do to it: its workers, what waits and runs, dead letters. For the role `operator`.

`collector` looks, `snapshot` is what it sees, `reports` what workers say of themselves; `members`, `requests` and
`dead_letters` have what can be done. `penstock top`, `penstock requests`, `penstock workers` and the gateway's page for
operators are made of them.
"""
