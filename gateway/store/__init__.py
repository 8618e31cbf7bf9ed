"""Data that the gateway itself keeps in Redis, so that any replica has it."""
