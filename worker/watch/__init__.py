"""A session's work beside requests: cancels, charges to lanes, reports, and entries left behind."""
