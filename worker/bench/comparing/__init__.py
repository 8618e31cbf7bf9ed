"""Two results of a benchmark, figure by figure: whether they may be compared, and how much each differs for sure.

`sameness` says whether, `figures` what is compared, `intervals` how sure, `comparison` has it all, `table` shows it.
"""
