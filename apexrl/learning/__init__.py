"""The learner's process: the log followed and decoded, updates, and the files that a run leaves."""
