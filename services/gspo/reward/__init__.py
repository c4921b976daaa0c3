"""The reward service: scores rollouts by user functions in sandboxes."""
