"""Connections to Redis, and what its errors mean."""
