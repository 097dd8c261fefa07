"""Environments as time steps. Nothing here knows torch, sockets or agents."""
