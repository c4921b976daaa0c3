"""The program of the built-in `reward_model`: a Hugging Face sequence-classification model, in a process of its own.

It alone here needs torch (`pip install gspo[reward-model]`). It runs outside the sandbox, which would keep it from the
GPU. For each line of JSON, {"conversations": [[message, ...], ...]}, it prints one, {"scores": [...]}. Its first line
reports that the model is loaded.
"""

import json
import sys
from collections.abc import Callable
from typing import Any


def load(
    path: str, device: str, max_length: int, batch_size: int
) -> Callable[[list[list[dict[str, str]]]], list[float]]:
    """A function that gives one number for each conversation, in order: the model's first logit."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.truncation_side = "left"  # the answer is at the end
    model = AutoModelForSequenceClassification.from_pretrained(path).to(device).eval()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id

    def text_of(conversation: list[dict[str, str]]) -> str:
        """The messages by the model's chat template, or one after the other if it has none."""
        if tokenizer.chat_template:
            return str(tokenizer.apply_chat_template(conversation, tokenize=False))
        return "".join(message["content"] for message in conversation)

    def scores(conversations: list[list[dict[str, str]]]) -> list[float]:
        numbers: list[float] = []
        for start in range(0, len(conversations), batch_size):
            texts = [text_of(conversation) for conversation in conversations[start : start + batch_size]]
            tokens = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
            with torch.inference_mode():
                numbers += model(**tokens.to(device)).logits[:, 0].float().tolist()
        return numbers

    return scores


def main() -> None:
    """Serve until the input ends."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    # Libraries print to standard output, which carries the answers.
    channel, sys.stdout = sys.stdout, sys.stderr
    scores = load(options["model"], options["device"], options["max_length"], options["batch_size"])
    print("{}", file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps({"scores": scores(json.loads(line)["conversations"])}), file=channel, flush=True)


if __name__ == "__main__":
    main()
