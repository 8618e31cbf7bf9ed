"""HTTP in front of the queue: the APIs of OpenAI and Anthropic, for clients that know neither Redis nor Penstock.

A gateway holds nothing that a client may ask for later: it is a client of the queue, and any replica can go on where
another stopped.
"""
