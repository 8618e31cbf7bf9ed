"""API keys: who may ask for what, and how much of it. They live in Redis, so that all replicas know them."""
