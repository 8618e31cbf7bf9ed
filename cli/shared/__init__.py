"""What commands share: options, exit statuses, the connection to Redis, times and values as people write them."""
