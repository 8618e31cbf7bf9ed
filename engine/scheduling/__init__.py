"""Decides what each step computes, on the host in plain Python: no jax, no numpy."""
