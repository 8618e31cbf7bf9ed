"""What examples/ holds."""
