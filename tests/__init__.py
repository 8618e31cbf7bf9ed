"""Tests of everything, in rooms named as what they test."""
