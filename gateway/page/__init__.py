"""A page to try the gateway with, in a browser and without internet."""
