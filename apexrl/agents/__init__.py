"""One algorithm a file: its actor half and its learner half."""
