"""The modules that play a rollout within an agent's sandbox: they import the standard library and each other alone.

program.py is the program of the sandbox, task.py what an agent gets, loading.py finds an agent's function.
"""
