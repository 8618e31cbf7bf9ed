"""Measurements: each module has a command line, says at its top what it measures, and appends to `results/`.

`parts/` has what they share. `lanes/` simulates the fairness of tenants, and `peers/` measures other engines.
"""
