"""Models on a CPU: weights in panels, and blocks that are one call into C++."""
