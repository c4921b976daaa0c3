"""The profile of agents and MCP servers: programs of any language with processes of their own.

Their namespaces keep network, files and other processes away, but for an agent's relays to named addresses; here the
process gives up its privileges. A reward function's worker gives up more (confine.py).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from . import confine

_MIB = 2**20
_NUM_FILES, _FILE_BYTES, _NOBODY = 1024, 2**40, 65534


def confine_agent(setup: dict[str, Any]) -> None:
    """Give up everything that agents may not have, for good; programs that they start have no more.

    Args:
        setup: Its uid, user_namespace, memory_mb and num_tasks. Its `places` are paths that the user must be able to
            read. Its `filter` is seccomp's, in hexadecimal, or empty. `in_memory` bounds the files of folders.

    Raises:
        OSError: The kernel refuses a part.
    """
    confine.be_first_to_go()
    for folder, num_files in setup["in_memory"].items():
        confine.limit_files(folder, num_files)
    places = [Path(place) for place in setup["places"]]
    confine.take_own_user(setup["uid"], places, namespace=setup["user_namespace"])
    if setup["user_namespace"] and not setup["uid"]:
        confine.enter_user_namespace(_NOBODY)  # bubblewrap's has capabilities over the file systems
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


def become_rollout(parent: int) -> None:
    """Open a rollout's process, a copy of its host, to its own programs, and let it end with its host.

    Args:
        parent: The host's id.
    """
    confine.show()
    confine.die_with_parent(parent)


def become_command(setup_json: str) -> NoReturn:
    """Give up the same, and run a program in place of this process, in a folder with links to its files.

    Args:
        setup_json: That of `confine_agent`, with command, folder, reads, and parent: the process with which the program
            ends, or 0 where its namespace sees to that.
    """
    setup = json.loads(setup_json)
    confine_agent(setup)
    if setup["parent"]:
        confine.die_with_parent(setup["parent"])  # after the change of user, which would undo it
    os.chdir(setup["folder"])
    for path in map(Path, setup["reads"]):
        Path(path.name).symlink_to(path)
    # A temporary folder of its own: a program may make one there of the name that a link to a file has.
    temporary = Path(".tmp")
    temporary.mkdir()
    os.environ.update(HOME=setup["folder"], TMPDIR=str(temporary.absolute()))
    program = setup["command"][0]
    try:
        os.execvp(program, setup["command"])  # noqa: S606 - the purpose of this process
    except OSError as error:
        sys.exit(f"{program} cannot be started: {error.strerror}")
