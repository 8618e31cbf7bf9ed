"""Two browser pages that need no internet: one to try the gateway, one to look after queues."""
