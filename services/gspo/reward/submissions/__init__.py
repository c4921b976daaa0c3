"""Submitted functions before they are registered: callers, checks, trials."""
