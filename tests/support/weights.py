"""Weights in the forms that others write them, and weights of another model, staged as a push stages them."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from gspo.generation.engine.staging import PolicyCopies


def store_tied_head(folder: Path) -> Path:
    """Write the output layer of a tied model into its file, as published models and merge tools do."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    return folder


def stage(copies: PolicyCopies, folder: Path) -> PolicyCopies:
    """Stage another model's weights in full, in pieces, as a push does."""
    other = PolicyCopies.from_folder(folder, "float32")
    copies.begin(changes=False)
    for name in copies.places:
        bits = other.serving.bits(name)
        half = len(bits) // 2
        copies.write(name, 0, bits[:half].tobytes())
        copies.write(name, half, bits[half:].tobytes())
    assert copies.staged_digest() == other.serving_digest()
    other.close()
    return copies
