"""The experience of a learner: it follows logs, holds their unrolls, and gathers draws of them."""
