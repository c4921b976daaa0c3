"""A recorded version of a reward function on logged rollouts, from the page of a run."""
