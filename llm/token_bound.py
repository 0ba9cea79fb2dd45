"""How few tokens a text can possibly have, without tokenizing it: so that an absurdly long prompt is refused at no cost.

One token stands for at most `most_characters` characters: the longest token's, times what the normalizer may make one
of. There is such a bound only where every character leaves a trace: no normalizer, pre-tokenizer or added token drops
or swallows any, and an unknown character becomes bytes or a token of its own.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from llm.detokenization import BYTE_OF_CHARACTER

_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_MOST_COMPOSED = 4  # characters that a composed one stands for, at most: U+1F82 does for four
_CONTINUATION_BYTES = range(0x80, 0xC0)


@dataclass(frozen=True, slots=True)
class TokenBound:
    most_characters: int
    lost: frozenset[str]  # characters that this vocabulary can't spell and drops

    def fewest_tokens(self, text: str) -> int:
        kept = len(text) - sum(text.count(character) for character in self.lost)
        return -(-kept // self.most_characters)


def token_bound(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> TokenBound | None:
    """None where this tokenizer's tokens may stand for any number of characters."""
    normalizers = _steps(tokenizer.normalizer, "normalizers")
    pre_tokenizers = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    lost = _lost_characters(tokenizer.model, vocabulary, byte_level=byte_level)
    swallows = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    if lost is None or swallows or not all(_keeps_all(step) for step in pre_tokenizers):
        return None
    if lost and any(step["type"] == "Replace" for step in normalizers):
        return None
    most = max(map(len, vocabulary))
    for step in normalizers:
        factor = _shrinks(step)
        if factor is None:
            return None
        most *= factor
    return TokenBound(most, lost)


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps, in no order."""
    if part is None:
        return []
    open_steps, steps = [json.loads(part.__getstate__())], []
    while open_steps:
        step = open_steps.pop()
        if step["type"] == "Sequence":
            open_steps.extend(step[key])
        else:
            steps.append(step)
    return steps


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    """How many characters it makes one of, at most; None if there is no bound."""
    kind = normalizer["type"]
    if kind in {"NFC", "NFD", "NFKC", "NFKD"}:
        return _MOST_COMPOSED
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 1 if len(pattern) == 1 and normalizer["content"] else None
    return 1 if kind in {"Prepend", "Lowercase", "ByteLevel"} else None


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in {"Split", "Punctuation"}:
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS


def _lost_characters(model: Any, vocabulary: dict[str, int], *, byte_level: bool) -> frozenset[str] | None:
    """The characters that leave no token; None if that can't be said."""
    if type(model).__name__ != "BPE":
        return None
    if byte_level:
        missing = {byte for character, byte in BYTE_OF_CHARACTER.items() if character not in vocabulary}
        if model.unk_token is not None or not missing.isdisjoint(_CONTINUATION_BYTES):
            return None
        return frozenset(chr(byte) for byte in missing if byte < 0x80)
    spells_bytes = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    marks_each = model.unk_token is not None and not model.fuse_unk
    return frozenset() if spells_bytes or marks_each else None
