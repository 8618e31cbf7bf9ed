"""The way from the queue to the engine: takes entries, tokenizes them, restores interrupted requests, hands back."""
