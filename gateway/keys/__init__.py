"""API keys: who may use which models, and how much. They are in Redis, so that all replicas know them."""
