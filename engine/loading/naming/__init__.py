"""From the name of a model to its files: those that are here, those that ship as packages, the hub's, and downloads."""
