"""The profile of agents: programs of any language with processes of their own, behind relays to named addresses.

Their namespaces keep network, files and other processes away; here the process gives up its privileges. A reward
function's worker gives up more (confine.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import confine

_MIB = 2**20
_NUM_FILES, _FILE_BYTES = 1024, 2**40


def confine_agent(setup: dict[str, Any]) -> None:
    """Give up everything that agents may not have, for good; programs that they start have no more.

    Args:
        setup: uid, user_namespace, places (paths that its user must be able to read), memory_mb, num_tasks, and filter:
            seccomp's, in hexadecimal, or empty.

    Raises:
        OSError: The kernel refuses a part.
    """
    confine.be_first_to_go()
    places = [Path(place) for place in setup["places"]]
    confine.take_own_user(setup["uid"], places, namespace=setup["user_namespace"])
    confine.drop_capabilities()
    confine.no_new_privileges()
    confine.adopt_orphans()
    confine.limit(
        confine.WorkerBounds(
            setup["memory_mb"] * _MIB, _FILE_BYTES, _NUM_FILES, setup["num_tasks"], written_memory=True
        )
    )
    if setup["filter"]:
        confine.load_filter(bytes.fromhex(setup["filter"]))
