"""Every Redis key of the gateway's own, and nothing else.

The braces are Redis Cluster hash tags: a script touches keys of one tag only.
"""

from __future__ import annotations
