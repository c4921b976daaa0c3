"""Measurements of speed and of learning on one machine; `python -m benchmarks` makes docs/benchmarks.md of them.

Not part of the package, and no tests: nothing here asserts a speed.
"""
