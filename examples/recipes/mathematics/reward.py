"""A form that the verifier can read: exactly one box, in the last line."""


def reward(completions, **columns):  # noqa: ARG001 - TRL's signature
    """1 for an answer with one box, which is in its last line, else 0."""
    return [_one_box(completion[-1]["content"]) for completion in completions]


def _one_box(text):
    return float(text.count("\\boxed{") == 1 and "\\boxed{" in text.rstrip().rsplit("\n", 1)[-1])
