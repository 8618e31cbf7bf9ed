"""Two pages, in a browser and without internet: one to try the gateway with, one to look after queues."""
