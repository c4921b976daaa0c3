"""The modules inside the sandbox: they import only the standard library, msgspec and each other.

supervisor.py is the trusted process of a sandbox; it runs no user code, and forks a worker (worker.py) for each
session. A worker confines itself (confine.py), loads the user's code (recognise.py finds the function) and answers
questions (results.py makes plain values of its results).
"""
