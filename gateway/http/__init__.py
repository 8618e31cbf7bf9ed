"""HTTP as the gateway speaks it, whatever is asked for: bodies, errors, event streams, clients that go away."""
