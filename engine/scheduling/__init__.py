"""What each step computes, decided on the host in plain Python: no jax, no numpy."""
