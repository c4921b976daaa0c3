"""The calculator example with an agent: `gspo run` plays the rollouts with agent.py, which knows nothing of gspo.

Not part of the package: it does what a user would do in a terminal, or in two with --external.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

if __name__ == "__main__":
    from conversations import demo

    demo(HERE, "Train a small model through an agent that calls it by OpenAI's API.", "agent.yaml")
