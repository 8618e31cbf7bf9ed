"""The version of Penstock, in a module of its own so that all parts can import it."""

__version__ = "0.1.0"
