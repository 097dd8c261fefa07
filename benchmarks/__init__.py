"""Measurements. Each is one command, and its results go to docs/."""
