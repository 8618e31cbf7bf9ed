"""What `penstock bench` measures with: requests, when they arrive, what is noted of each, and what is said of them.

`on_engine` drives an engine in this process, `on_service` sends through Redis; all the rest is shared by the two.
"""
