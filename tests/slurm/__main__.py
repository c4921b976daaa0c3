"""gspo under a real Slurm, from a user's seat: `make slurm-test`.

Two nodes train two runs side by side; one is cancelled and continued. A third run meets its time limit, then loses its
batch node, then a generator's, and continues each time. Invalid input is refused in words.
Exit codes: 0 passed, 1 failed, 3 nothing was tested: this is not root, or Slurm is missing and cannot be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.slurm.cluster import Cluster, missing_programs
from tests.slurm.scenarios import SCENARIOS, Stage

EXIT_FAILED, EXIT_NOT_TESTED = 1, 3
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "openssh-server", "openssh-client")
_INSTALL_S = 300
# Debian asks this file whether a package may start its services; 101 is no. The test starts its own.
_POLICY, _NO_SERVICES = Path("/usr/sbin/policy-rc.d"), "#!/bin/sh\nexit 101\n"


def main() -> None:
    """Run the scenarios, and show the last words of the jobs where one does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm")
    parser.add_argument("scenarios", nargs="*", choices=[[], *SCENARIOS], help="these alone")
    chosen = parser.parse_args().scenarios or list(SCENARIOS)
    if os.geteuid() != 0:
        print("slurm-test: NOT TESTED: only root can make namespaces", file=sys.stderr)
        sys.exit(EXIT_NOT_TESTED)
    if missing := missing_programs():
        if not shutil.which("apt-get"):
            print(f"slurm-test: NOT TESTED: {', '.join(missing)} missing, and there is no apt-get", file=sys.stderr)
            sys.exit(EXIT_NOT_TESTED)
        print(f"slurm-test: installing {', '.join(missing)}", flush=True)
        install()
    # As an exception, so that the cluster's processes and namespaces end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILED))
    folder = Path(tempfile.mkdtemp(prefix="gspo-slurm-"))
    folder.chmod(0o755)
    start = time.monotonic()
    try:
        with Cluster(folder, ("n1", "n2"), cpus=8) as cluster:
            stage = Stage(cluster, start)
            for name in chosen:
                SCENARIOS[name](stage)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        for file in sorted(folder.glob("*.out")):
            print(f"--- {file.name}\n{file.read_text()[-3000:]}")
        print(f"slurm-test: FAILED: {error}\nlogs: {folder}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    shutil.rmtree(folder)
    print(f"slurm-test: all held after {time.monotonic() - start:.0f} s")


def install() -> None:
    """Install Debian's packages. Slurm's, munge's and ssh's services are not started on this machine."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    is_ours = not _POLICY.exists()
    if is_ours:
        _POLICY.write_text(_NO_SERVICES)
        _POLICY.chmod(0o755)
    try:
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *_PACKAGES]):
            command = ["apt-get", *words]
            subprocess.run(command, check=True, timeout=_INSTALL_S, stdout=subprocess.DEVNULL, env=environment)
    finally:
        if is_ours:
            _POLICY.unlink()


if __name__ == "__main__":
    main()
