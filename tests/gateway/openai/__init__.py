"""OpenAI's API, with its official client."""
