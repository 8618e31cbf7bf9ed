"""What version of Penstock this is. Apart, so that all of its parts can say it."""

__version__ = "0.1.0"
