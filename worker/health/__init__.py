"""The HTTP port: liveness, readiness, metrics, and what keeps strangers from using it up."""
