"""`penstock map`: a file of prompts in, a file of replies out. A run that was killed continues where it stopped."""
