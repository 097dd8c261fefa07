"""The processes that a person or the launcher starts: each parses its command line, builds the parts, and runs."""
