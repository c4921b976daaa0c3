"""Measurements of speed and of learning on one machine: `python -m benchmarks` and its commands.

They are neither part of the package nor tests: nothing here asserts a speed.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache/benchmarks"
RESULTS = ROOT / "benchmarks/results"
DOCS = ROOT / "docs"
