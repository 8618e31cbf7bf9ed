"""Penstock: a message-queue worker service for LLM inference. Here is the client; `penstock worker` runs a worker.

from penstock import Client

with Client() as client:
    for chunk in client.stream("12 + 30 ="):
        print(chunk.text, end="", flush=True)
"""

from penstock import producer
from penstock.producer import *  # noqa: F403  its `__all__` is the one list of what users import

__version__ = "0.1.0"

__all__ = ["__version__"]
__all__ += producer.__all__
