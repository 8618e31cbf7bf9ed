"""Requests and answers over HTTP, whatever they ask."""
