"""The engine without a queue. The rooms are those of engine/; `whole` drives engines from requests to tokens."""
