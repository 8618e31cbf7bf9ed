"""The making of the demo model (`penstock.engine.demo`): data, training, evaluation. See `README.md`."""
