"""Files that clients upload, and that batches make: bytes in Redis, in pieces."""
