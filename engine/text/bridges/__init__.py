"""Bridges between what a conversation holds and what a chat template can show."""
