"""What all sides agree on in Redis."""
