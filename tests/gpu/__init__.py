"""What only a GPU can show, in parts of less than five minutes each: `python -m tests.gpu`; rows in docs/gpu.md."""
