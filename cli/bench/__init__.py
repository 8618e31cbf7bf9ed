"""`penstock bench`: its commands, and what each of them measures."""
