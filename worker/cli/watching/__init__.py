"""What `penstock top` shows, and how keys are read. `penstock workers` and `penstock requests` show the same tables."""
