"""Scores of rollouts, from the streams and on request."""
