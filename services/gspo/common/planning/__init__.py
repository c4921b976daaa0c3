"""The cost of a run on GPUs, computed before anything is started: memory, time, weight updates, staleness."""
