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


class Network:
    """Namespaces by process name; Redis and everything unnamed stay outside, at the bridge's address."""

    def __init__(self, names: Sequence[str]) -> None:
        # Namespaces are the machine's: another run of this beside has others.
        self._own = os.getpid() % 250
        self._outside_device, self._hub = f"gc{self._own}", f"gspo-chaos-{self._own}"
        self._names = tuple(names)
        self.outside = f"10.215.{self._own}.254"

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
            _ip(f"netns add {self._hub}")
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

    def _place(self, name: str) -> tuple[str, str]:
        return (f"-n {self._space(name)}", _DEVICE) if name in self._names else ("", self._outside_device)

    def _space(self, name: str) -> str:
        return f"gspo-chaos-{self._own}-{name}"


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
