"""`gspo plan`: the memory, time and staleness of a run, from a model's config.json and the data sheet of a GPU."""
