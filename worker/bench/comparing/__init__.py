"""Compares two results of a benchmark, figure by figure: whether they may be compared, and how certain each change is.

`sameness` decides whether, `figures` lists what is compared, `intervals` says how certain a change is, `comparison`
puts it together and `table` prints it.
"""
