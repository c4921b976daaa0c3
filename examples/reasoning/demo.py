"""Three tasks of reasoning-gym: a cold start on two of them, then reinforcement learning on all at once.

Not part of the package: it makes the files that a user would bring, and calls `gspo run` on them as a user would.
Rows come from tasks.py, scores from reward.py, and the keys from config.yaml.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

if __name__ == "__main__":
    from conversations import demo

    demo(HERE, "Make a small model that answers three tasks of reasoning-gym badly, and train it by its rewards alone.")
