"""The program of the built-in `reward_model`: a Hugging Face sequence-classification model, in a process of its own.

It alone here needs torch (`pip install gspo[reward-model]`). It runs outside the sandbox, which would keep it from the
GPU. For each line of JSON, {"conversations": [[message, ...], ...]}, it prints one, {"scores": [...]}. Its first line
reports that the model is loaded.
"""

from __future__ import annotations

import json
import sys
from typing import Any


class Classifier:
    """The loaded model: one number for each conversation, its first logit."""

    def __init__(self, path: str, device: str, max_length: int) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._torch, self._max_length = torch, max_length
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._tokenizer.truncation_side = "left"  # the answer is at the end
        self._model = AutoModelForSequenceClassification.from_pretrained(path).to(self._device).eval()
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def scores(self, conversations: list[list[dict[str, str]]], batch_size: int) -> list[float]:
        """One number for each, in order."""
        scores: list[float] = []
        texts = [self._text(conversation) for conversation in conversations]
        for start in range(0, len(texts), batch_size):
            tokens = self._tokenizer(
                texts[start : start + batch_size],
                padding=True,
                truncation=True,
                max_length=self._max_length,
                return_tensors="pt",
            ).to(self._device)
            with self._torch.inference_mode():
                scores += self._model(**tokens).logits[:, 0].float().tolist()
        return scores

    def _text(self, conversation: list[dict[str, str]]) -> str:
        """The messages by the model's chat template, or one after the other if it has none."""
        if self._tokenizer.chat_template:
            return str(self._tokenizer.apply_chat_template(conversation, tokenize=False))
        return "".join(message["content"] for message in conversation)


def main() -> None:
    """Serve until the input ends."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    # Libraries print to standard output, which carries the answers.
    channel, sys.stdout = sys.stdout, sys.stderr
    classifier = Classifier(options["model"], options["device"], options["max_length"])
    print("{}", file=channel, flush=True)
    for line in sys.stdin:
        scores = classifier.scores(json.loads(line)["conversations"], options["batch_size"])
        print(json.dumps({"scores": scores}), file=channel, flush=True)


if __name__ == "__main__":
    main()
