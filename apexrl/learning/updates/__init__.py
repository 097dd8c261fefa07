"""The updates of a learner: one after the other, captured on a GPU, shared among learners."""
