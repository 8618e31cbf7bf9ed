"""Steps on the device: their shapes, programs and sampling."""
