"""The shares of the learner's ranks: each owns whole layers of a version, and serves them to the generators."""
