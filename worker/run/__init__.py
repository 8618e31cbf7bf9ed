"""A request while it runs: its queue entry, its choices, what it takes up, and what is traced of it."""
