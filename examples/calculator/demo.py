"""A model learns to use a calculator: a cold start, then reinforcement learning on whole conversations.

Not part of the package: it makes the files that a user would bring, and calls `gspo run` on them as a user would.
cold_start.py makes model and problems, config.yaml says how they are trained; environment and reward are built in.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

if __name__ == "__main__":
    from conversations import demo

    demo(HERE, "Make a small model that seldom uses its tool, and train it by its rewards alone.")
