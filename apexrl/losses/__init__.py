"""Pure functions of tensors and arrays, one topic a file."""
