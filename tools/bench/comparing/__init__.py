"""Compares two results of a benchmark, figure by figure: whether they may be compared, and how certain changes are.

`sameness` says whether, `figures` what is compared, `intervals` how certain, `comparison` has it all, `table` shows it.
"""
