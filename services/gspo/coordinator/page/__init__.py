"""The page of the run at the coordinator's address: who may see it, and the process that makes it."""
