"""What a session does besides running requests: cancelling, charging tenants, reporting, sweeping the queue."""
