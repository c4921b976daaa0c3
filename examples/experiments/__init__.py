"""Experiments on the examples, each with a page of its own in docs/."""
