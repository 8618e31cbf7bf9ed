"""The APIs of OpenAI, as values: requests to what the queue takes, replies to bodies and events."""
