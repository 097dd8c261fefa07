"""Pure tensor functions, one topic a file."""
