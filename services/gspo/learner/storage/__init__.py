"""The files of the run directory: the log, the checkpoints, the best version."""
