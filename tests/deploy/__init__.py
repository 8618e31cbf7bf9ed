"""What deploy/ holds, run as it would be."""
