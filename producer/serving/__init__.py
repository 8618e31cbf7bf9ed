"""What two servers share, worker and gateway: how they stand with Redis."""
