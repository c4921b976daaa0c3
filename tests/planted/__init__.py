"""Runs of the arithmetic example with a planted fault each, and what their figures were."""
