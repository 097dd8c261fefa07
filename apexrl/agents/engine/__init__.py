"""What makes a plain algorithm fast, and all that algorithms share: gradients, optimizers, targets, policies."""
