"""`gspo replay`: makes steps of a run again, and compares them with the record."""
