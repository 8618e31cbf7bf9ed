"""The screen of `penstock top`."""
