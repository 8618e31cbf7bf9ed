"""Settings of worker and gateway, and where they come from."""
