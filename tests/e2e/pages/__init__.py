"""What pages tell readers to run."""
