"""How processes end, by signal and by themselves."""
