"""OpenAI's Responses API: answers that are stored, run in the background, and can be read again from any event on."""
