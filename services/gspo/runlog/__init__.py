"""Reads the log of a run: the folder `log/` of its run directory, which the learner alone writes.

The learner, `gspo status`, the page and the trackers all read it through this package. It imports no service, and
pyarrow only where a step file is opened.
"""
