"""A planned step on the device: its shapes, how it is packed, compiled, run and measured."""
