"""Why a job can't begin or go on."""

from __future__ import annotations


class MapError(Exception):
    """A job can't begin or go on. The message names the file and what is wrong with it."""
