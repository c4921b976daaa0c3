"""What runs inside the sandbox: the standard library and msgspec alone, and no import of ours from elsewhere.

supervisor.py is the trusted process that a sandbox starts with; it runs no user code, and forks a worker (worker.py)
for each session, which confines itself (confine.py), loads the user's code (recognise.py finds the function) and
answers questions (results.py makes plain values of what it returned).
"""
