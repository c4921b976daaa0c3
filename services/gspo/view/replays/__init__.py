"""The results of `gspo replay` on the page of a run."""
