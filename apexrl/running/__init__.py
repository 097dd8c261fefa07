"""The launcher's process: a plan, role processes that are watched, the screen, TensorBoard."""
