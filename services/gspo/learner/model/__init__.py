"""The policy as a network: batches of rollouts in, log-probs and named weights out."""
