"""What operators see and do over HTTP: what the page at `/operations` asks. Only API keys made for it are let in."""
