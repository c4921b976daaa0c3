"""A model learns to calculate in long answers without a slip: a cold start, then reinforcement learning.

Not part of the package: it makes the files that a user would bring, and calls `gspo run` on them as a user would.
Model and problems come from cold_start.py, the keys from config.yaml; the reward is built in.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

if __name__ == "__main__":
    from conversations import demo

    demo(HERE, "Make a small model that errs in long calculations, and train it by its rewards alone.")
