"""Tables and keys of `penstock top`. `penstock workers` and `penstock requests` show the same tables."""
