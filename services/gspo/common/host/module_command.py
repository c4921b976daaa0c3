"""How gspo starts a module of its own as a process."""

import sys

# In the environment of every process that a supervisor starts, with the supervisor's id.
SUPERVISOR_VARIABLE = "GSPO_SUPERVISOR"
# The file in memory for the policies of the generators that it starts, where their command line names none.
POLICIES_VARIABLE = "GSPO_POLICIES"


def module_command(module: str) -> tuple[str, ...]:
    """The four words that run a module with this Python.

    -P keeps the working directory off `sys.path`: a stray inspect.py of the user would replace the standard one.
    """
    return (sys.executable, "-P", "-m", module)
