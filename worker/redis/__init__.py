"""How a worker uses Redis: retries, commands that set junk aside, and the permissions that it checks at the start."""
