"""The record of a run: status, metrics, evaluations, and the pages that people read."""
