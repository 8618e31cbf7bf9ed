"""Batches: some gateway sends a file's requests to the queue and reads the answers. Others take over if it is
killed.
"""
