"""OpenAI's APIs as values: converts their requests for the queue, and replies to bodies and events."""
