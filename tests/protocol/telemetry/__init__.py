"""Traces and metrics by OTLP."""
