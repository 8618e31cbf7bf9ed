"""How Redis is reached and spoken to. The worker shares it with the client."""
