"""From logits to tokens, on the device: penalties, masks, draws, log-probabilities."""
