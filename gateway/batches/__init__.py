"""Batches: a file of requests, which some gateway sends to the queue and reads the answers of, whoever is killed."""
