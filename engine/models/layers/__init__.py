"""The layers that families are made of. All work on a flat axis of tokens, `[num_tokens, ...]`."""
