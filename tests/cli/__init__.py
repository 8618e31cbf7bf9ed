"""Commands, a file each."""
