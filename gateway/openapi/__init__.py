"""A description of the gateway's API, for programs and for people."""
