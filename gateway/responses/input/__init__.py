"""The input of a response, item by item."""
