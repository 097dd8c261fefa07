"""Ape-X: distributed prioritized experience replay as a replicated experience log."""

__version__ = "0.2.0"
