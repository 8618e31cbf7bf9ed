"""HTTP front end of the queue: the APIs of OpenAI and Anthropic, for clients that know neither Redis nor Penstock.

A gateway holds no state that a client may ask for later: it is a client of the queue, and any replica can continue
where another stopped.
"""
