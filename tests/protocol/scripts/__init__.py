"""Each Lua script, by noun, and models of them all."""
