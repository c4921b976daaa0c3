"""The files of the run directory: the log and the checkpoints."""
