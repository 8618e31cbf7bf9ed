"""Through the gateway to workers."""
