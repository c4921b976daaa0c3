"""Scored rollouts become groups, and groups become the rows of a step."""
