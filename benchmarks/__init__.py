"""Measurements, each one command; results go to docs/."""
