"""Keys of other programs' HTTP APIs, which come from the environment: no file of a run holds one."""

import os


def key_header(variable: str) -> dict[str, str]:
    """The header with the key in an environment variable; none where it is not set."""
    key = os.environ.get(variable, "")
    return {"authorization": f"Bearer {key}"} if key else {}
