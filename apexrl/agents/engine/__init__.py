"""The engine under plain algorithms, fast and the same for all: gradients, optimizers, targets, policies."""
