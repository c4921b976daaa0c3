"""The loss of a step: its targets and the terms of its micro-batches."""
