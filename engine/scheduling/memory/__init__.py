"""Pages and states of the cache: pools of them, the prefix cache's index, and the tables of each sequence."""
