"""Programs that play the rollouts of a run, on any machine: no engine is imported here."""
