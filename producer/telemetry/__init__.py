"""Traces and metrics by OpenTelemetry, for whoever asks for them: `loading` alone is imported before that.

The other modules import opentelemetry, which the extra `otel` installs. docs/tracing.md says what they record.
"""
