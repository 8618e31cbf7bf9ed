"""Measurements: each module has a command line, and says at its top what it measures. Most append to `results/`.

`parts/` has what they share. `lanes/` simulates the fairness of tenants, and `peers/` measures other engines.
"""
