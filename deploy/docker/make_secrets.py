"""Makes the secrets that the containers share, if they are missing: `python make_secrets.py FOLDER [GRAFANA_FOLDER]`.

Not part of the package: it runs once, before Redis. A file that is there stays as it is, so a folder of your own may
hold all of them or some. Grafana, whose image is not ours, gets a folder with its password alone. Standard library
only.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

# The services run as one user, Redis, Prometheus and Grafana each as another.
OWN, EVERYONE = 0o400, 0o444
EXIT_BAD_INPUT = 2
OF_GRAFANA = "grafana_password"


def make(folder: Path) -> list[str]:
    """Write the missing secrets; return their names. OSError: the folder cannot be written."""
    made = []
    password = _password(folder / "redis_password")
    contents = {
        "token": (secrets.token_urlsafe(32), OWN),
        "redis_password": (password, OWN),
        # Redis takes a password from its configuration alone, not from a file that holds nothing else.
        "redis.conf": (f"requirepass {password}\n", EVERYONE),
        OF_GRAFANA: (secrets.token_urlsafe(16), EVERYONE),
    }
    for name, (content, mode) in contents.items():
        path = folder / name
        if not path.exists():
            path.touch(mode=mode)
            path.chmod(0o600)
            path.write_text(content, encoding="utf-8")
            path.chmod(mode)
            made.append(name)
    return made


def hand_out(folder: Path, to: Path) -> None:
    """Copy Grafana's password to a folder of its own. OSError: one of the folders cannot be read or written."""
    path = to / OF_GRAFANA
    path.unlink(missing_ok=True)
    path.write_text((folder / OF_GRAFANA).read_text(encoding="utf-8"), encoding="utf-8")
    path.chmod(EVERYONE)


def _password(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.exists() else secrets.token_urlsafe(32)


def main() -> None:
    """Make them, or say in one line why not."""
    folder = Path(sys.argv[1])
    try:
        made = make(folder)
        for grafana in sys.argv[2:]:
            hand_out(folder, Path(grafana))
    except OSError as error:
        sys.stderr.write(
            f"error: secrets: {error.filename} cannot be read or written ({error.strerror}). Let user 1000 write "
            "there, or put the files token, redis_password, redis.conf and grafana_password into it yourself\n"
        )
        sys.exit(EXIT_BAD_INPUT)
    sys.stdout.write(f"made: {', '.join(made)}\n" if made else "all there\n")


if __name__ == "__main__":
    main()
