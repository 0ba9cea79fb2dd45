"""Writes small GGUF files, by the format's description: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, HIDDEN_MLP = 32, 4, 2, 64
WORDS = ["<|endoftext|>", "a", "b", "ab", "1", "Ġ"]

F32, F16, Q4_1, Q8_0, BF16 = 0, 1, 3, 8, 30
_U32, _I32, _F32, _STRING, _ARRAY = 4, 5, 6, 8, 9

Tensor = tuple[int, tuple[int, ...], bytes]  # kind, shape (rows first), data


def metadata(**changes: Any) -> dict[str, Any]:
    """What a file of a tiny llama has; None leaves a key out. Dots in names are written as double underscores."""
    known: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": HIDDEN_MLP,
        "llama.block_count": 1,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }
    known |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in known.items() if value is not None}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> Tensor:
        return F32, shape, rng.normal(size=shape).astype(np.float32).tobytes()

    kv_size = HIDDEN * KV_HEADS // HEADS
    return {
        "token_embd.weight": random(len(WORDS), HIDDEN),
        "blk.0.attn_q.weight": random(HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": random(kv_size, HIDDEN),
        "blk.0.attn_v.weight": random(kv_size, HIDDEN),
        "blk.0.attn_output.weight": random(HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": random(HIDDEN_MLP, HIDDEN),
        "blk.0.ffn_up.weight": random(HIDDEN_MLP, HIDDEN),
        "blk.0.ffn_down.weight": random(HIDDEN, HIDDEN_MLP),
        "blk.0.attn_norm.weight": random(HIDDEN),
        "blk.0.ffn_norm.weight": random(HIDDEN),
        "output_norm.weight": random(HIDDEN),
    }


def values(tensor: Tensor) -> NDArray[np.float32]:
    """Of one in float32."""
    return np.frombuffer(tensor[2], np.float32).reshape(tensor[1])


def write(path: Path, meta: dict[str, Any] | None = None, weights: dict[str, Tensor] | None = None) -> Path:
    meta = metadata() if meta is None else meta
    weights = tensors() if weights is None else weights
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(weights), len(meta))
    for name, value in meta.items():
        head += _string(name) + _value(value)
    data = b""
    for name, (kind, shape, raw) in weights.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    match value:
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case float():
            return struct.pack("<If", _F32, value)
        case int():
            return struct.pack("<II", _U32, value)
        case [str(), *_]:
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _I32, len(value), *value)
