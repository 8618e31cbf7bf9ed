"""A session's work besides requests: cancels, charges to lanes, reports, and entries left behind."""
