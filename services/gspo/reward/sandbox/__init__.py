"""Sandboxes for user code. Of this folder only `inside` is visible to that code."""
