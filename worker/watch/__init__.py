"""What a session looks after beside requests: cancels, what lanes are charged, reports, and entries left behind."""
