"""One training step: targets, losses and optimizer steps on every rank."""
