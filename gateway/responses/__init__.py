"""OpenAI's Responses API: answers that are kept, run in the background, and are read again from any event on."""
