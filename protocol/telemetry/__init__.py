"""Traces and metrics by OpenTelemetry, for users who ask for them: only `loading` is imported before that.

The other modules import opentelemetry, which the extra `otel` installs. docs/tracing.md says what they record.
"""
