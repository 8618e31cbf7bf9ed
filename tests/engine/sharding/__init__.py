"""Models over several devices."""
