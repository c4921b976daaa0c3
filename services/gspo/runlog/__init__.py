"""Reads the log of a run: the folder `log/` of its run directory, which the learner alone writes.

The learner, `gspo status`, the report and the trackers all read it through this package. It imports no other package
of gspo, and pyarrow only where a step file is opened.
"""
