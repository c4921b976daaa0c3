"""The guessing example on a server of OpenEnv's, which has to run: README.md says how."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

if __name__ == "__main__":
    from conversations import demo

    demo(HERE.parent / "guess", "Train a small model on games of a server of OpenEnv's.", str(HERE / "config.yaml"))
