"""Files that clients upload and that batches make, stored in Redis in pieces."""
