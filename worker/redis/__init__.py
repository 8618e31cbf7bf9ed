"""How a worker uses Redis: retries, commands that a lost fence refuses, the permissions that it checks at start."""
