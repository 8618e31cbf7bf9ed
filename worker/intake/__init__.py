"""From the queue to the engine: takes entries, reads and tokenizes them, restores interrupted ones, hands back."""
