"""OpenAI's chat, completion and token APIs: their routes, and conversions of requests and replies."""
