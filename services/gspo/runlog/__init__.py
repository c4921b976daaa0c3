"""Reads the log of a run: the folder `log/` of its run directory. The learner writes it; its checks, the coordinator.

The learner, `gspo status`, the page and the trackers all read it through this package. It imports no service, and
pyarrow only where a step file is opened.
"""
