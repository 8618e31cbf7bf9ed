"""What operators set up around it: permissions, scaling, metrics, traces."""
