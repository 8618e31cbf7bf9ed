"""Why a job cannot begin or continue."""

from __future__ import annotations


class MapError(Exception):
    """A job cannot begin or continue. The message names the file and what is wrong with it."""
