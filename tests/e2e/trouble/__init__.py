"""Redis, clocks, logs or engines in trouble."""
