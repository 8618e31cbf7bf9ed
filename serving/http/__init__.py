"""The guard of an HTTP port: how many connections strangers may hold, for how long, and what refused ones are told."""
