"""Requests that go on elsewhere."""
