"""Replies as callers read them."""
