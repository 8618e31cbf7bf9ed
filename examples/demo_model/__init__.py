"""How the demo model (`penstock.engine.demo`) was made: data, training, evaluation. `README.md` tells all of it."""
