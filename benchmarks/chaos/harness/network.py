"""A network namespace for each process, on one bridge with Redis; a cut between two of them is silence both ways.

Nothing is refused and nothing closed while a cut lasts, as with a pulled cable. It needs root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

# No process has this address, so packets to it are lost.
_NOBODY = "02:00:00:00:00:fe"
_DEVICE, _BRIDGE = "eth0", "bridge"
_PREFIX, _MOST_NETWORKS = "gspo-chaos-", 250


class Network:
    """Namespaces by process name; Redis and everything unnamed stay outside, at the bridge's address."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._own = tuple(names), -1

    @property
    def outside(self) -> str:
        """The address of Redis and of everything unnamed."""
        return f"10.215.{self._own}.254"

    def address(self, name: str) -> str:
        """Where a process listens."""
        return f"10.215.{self._own}.{10 + self._names.index(name)}" if name in self._names else self.outside

    def inside(self, name: str, command: Sequence[str]) -> tuple[str, ...]:
        """A command in the namespace of a process."""
        return ("ip", "netns", "exec", self._space(name), *command)

    @contextmanager
    def up(self) -> Iterator[None]:
        """Make it, and remove it afterwards."""
        with ExitStack() as opened:
            # The bridge has a namespace too: a firewall outside, such as Docker's, would drop what it carries.
            self._own = _claimed_number()
            opened.callback(_ip, f"netns del {self._hub}")
            _ip(f"-n {self._hub} link add {_BRIDGE} type bridge")
            _ip(f"-n {self._hub} link set {_BRIDGE} up")
            _ip(f"link add {self._outside_device} type veth peer name out netns {self._hub}")
            opened.callback(_ip, f"link del {self._outside_device}")
            _ip(f"addr add {self.outside}/24 dev {self._outside_device}")
            _ip(f"link set {self._outside_device} up")
            _ip(f"-n {self._hub} link set out master {_BRIDGE} up")
            for number, name in enumerate(self._names):
                space = self._space(name)
                _ip(f"netns add {space}")
                opened.callback(_ip, f"netns del {space}")
                _ip(f"-n {space} link set lo up")
                _ip(f"-n {self._hub} link add p{number} type veth peer name {_DEVICE} netns {space}")
                _ip(f"-n {self._hub} link set p{number} master {_BRIDGE} up")
                _ip(f"-n {space} addr add {self.address(name)}/24 dev {_DEVICE}")
                _ip(f"-n {space} link set {_DEVICE} up")
            yield

    def cut(self, first: str, second: str) -> None:
        """Part two processes: packets between them are lost."""
        for name, peer in ((first, second), (second, first)):
            where, device = self._place(name)
            _ip(f"{where} neigh replace {self.address(peer)} lladdr {_NOBODY} dev {device} nud permanent")

    def join(self, first: str, second: str) -> None:
        """Undo a cut."""
        for name, peer in ((first, second), (second, first)):
            where, device = self._place(name)
            with suppress(RuntimeError):
                _ip(f"{where} neigh del {self.address(peer)} dev {device}")

    @property
    def _hub(self) -> str:
        return f"{_PREFIX}{self._own}"

    @property
    def _outside_device(self) -> str:
        return f"gc{self._own}"

    def _place(self, name: str) -> tuple[str, str]:
        return (f"-n {self._space(name)}", _DEVICE) if name in self._names else ("", self._outside_device)

    def _space(self, name: str) -> str:
        return f"{self._hub}-{name}"


def _claimed_number() -> int:
    """A number that no other network of this machine has, with the namespace of its bridge.

    Raises:
        RuntimeError: There is none, or namespaces cannot be made.
    """
    for attempt in range(_MOST_NETWORKS):
        number = (os.getpid() + attempt) % _MOST_NETWORKS
        try:
            _ip(f"netns add {_PREFIX}{number}")
        except RuntimeError as error:
            if "exists" not in str(error):
                raise
        else:
            return number
    raise RuntimeError(f"{_MOST_NETWORKS} namespaces are called {_PREFIX}NUMBER; remove those that no run uses")


def call(*words: str) -> None:
    """Run a command.

    Raises:
        RuntimeError: It failed; with its last words.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _ip(words: str) -> None:
    call("ip", *words.split())
