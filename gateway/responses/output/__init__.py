"""The output of a response, item by item."""
