"""tools/bench, and the simulations of benchmarks/."""
