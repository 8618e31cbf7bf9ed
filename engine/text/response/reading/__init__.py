"""Parses replies: text, reasoning and tool calls, token by token."""
