"""Slips that break a promise, each with the tests that must fail over it. `make mutants` makes one after the other."""
