"""Workers, gateways and clients for tests, within the process and as processes."""
