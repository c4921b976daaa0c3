"""A read-only web page of a run's step log; it needs the run directory alone."""
