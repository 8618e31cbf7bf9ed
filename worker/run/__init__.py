"""A request while it runs: its queue entry, its choices, and its traces; and the worker's capacity to run requests."""
