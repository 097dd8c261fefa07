"""Replay for actor-critics: the parts of a batch, and the states with which replayed unrolls begin."""
