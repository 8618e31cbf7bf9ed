"""From a request of any API to the queue, and from the reply to whoever asked for it."""
