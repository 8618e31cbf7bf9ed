"""Replies read: text, reasoning and tool calls, token by token."""
