"""Reads GGUF checkpoints of the Llama family into numpy: weights under Hugging Face names, config and tokenizer.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What we don't read is refused by name.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llm.exceptions import ModelRefused

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}  # name, numbers, bytes
_CONTROL_TOKEN = 3
_NEEDED = (
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.block_count",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
)

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Gguf:
    """One mapped file. Raises ModelRefused for what is no GGUF or holds what we don't read."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ModelRefused(f"{path.name} is no GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        magic, version, num_tensors, num_keys = self._unpack("<4sIQQ")
        if magic != b"GGUF" or version not in {2, 3}:
            raise ModelRefused(f"{path.name} is no GGUF file of version 2 or 3")
        try:
            self.metadata: dict[str, Any] = {self._string(): self._value(self._unpack("<I")[0]) for _ in range(num_keys)}
            self._tensors = self._read_index(num_tensors)
        except (struct.error, ValueError, KeyError, ArithmeticError, TypeError, MemoryError, RecursionError) as error:
            raise ModelRefused(f"{path.name} is damaged or cut off: {error}") from error
        self._check()

    def weights(self) -> Iterator[tuple[str, Floats]]:
        """Hugging Face name and float32 values of each tensor, one after the other."""
        meta = self.metadata
        query_heads = meta["llama.attention.head_count"]
        heads = {"attn_q": query_heads, "attn_k": meta.get("llama.attention.head_count_kv", query_heads)}
        for name, (kind, shape, raw) in self._tensors.items():
            weight = _dequantized(kind, raw).reshape(shape)
            part = name.split(".")[-2]
            yield self._hf_name(name), _unpermuted(weight, heads[part]) if part in heads else weight

    def __len__(self) -> int:
        return len(self._tensors)

    def config(self) -> dict[str, Any]:
        """The keys of a Hugging Face LlamaConfig."""
        meta = {key.removeprefix("llama."): value for key, value in self.metadata.items()}
        heads = meta["attention.head_count"]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(meta["tokenizer.ggml.tokens"]),
            "hidden_size": meta["embedding_length"],
            "intermediate_size": meta["feed_forward_length"],
            "num_hidden_layers": meta["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": meta.get("attention.head_count_kv", heads),
            "max_position_embeddings": meta["context_length"],
            "rms_norm_eps": meta["attention.layer_norm_rms_epsilon"],
            "rope_parameters": {"rope_type": "default", "rope_theta": meta.get("rope.freq_base", 10000.0)},
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
            "dtype": "bfloat16",
        }

    def tokenizer(self) -> Tokenizer:
        meta = self.metadata
        words: list[str] = meta["tokenizer.ggml.tokens"]
        merges = [(left, right) for left, right in (pair.split(" ") for pair in meta["tokenizer.ggml.merges"])]
        built = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
        built.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        built.decoder = decoders.ByteLevel()
        control = (word for word, kind in zip(words, meta["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN)
        built.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
        return built

    def tokenizer_config(self) -> dict[str, Any]:
        meta = self.metadata
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {kind: meta.get(f"tokenizer.ggml.{key}_token_id") for kind, key in keys.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            **{f"{kind}_token": meta["tokenizer.ggml.tokens"][i] for kind, i in ids.items() if i is not None},
        }

    @property
    def chat_template(self) -> str | None:
        template: str | None = self.metadata.get("tokenizer.chat_template")
        return template

    def _check(self) -> None:
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise ModelRefused(f"{self._name} holds a {architecture} model; of GGUF files only llama is read")
        kind = (self.metadata.get("tokenizer.ggml.model"), self.metadata.get("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ModelRefused(
                f"{self._name} has a tokenizer of kind {kind[0]}/{kind[1]}; of GGUF files only gpt2/smollm is read"
            )
        if any(key.startswith("llama.rope.scaling") for key in self.metadata):
            raise ModelRefused(f"{self._name} scales its rotary positions, which isn't read from a GGUF file")
        for key in _NEEDED:
            if key not in self.metadata:
                raise ModelRefused(f"{self._name} has no {key}")
        for name in self._tensors:
            self._hf_name(name)

    def _hf_name(self, name: str) -> str:
        match name.split("."):
            case [outer, "weight"] if outer in _OUTER_NAMES:
                return f"{_OUTER_NAMES[outer]}.weight"
            case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
                return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            case _:
                raise ModelRefused(f"{self._name} has a tensor that isn't known here: {name}")

    def _read_index(self, count: int) -> dict[str, tuple[str, tuple[int, ...], Bytes]]:
        found = []
        for _ in range(count):
            name = self._string()
            shape = self._unpack(f"<{self._unpack('<I')[0]}Q")[::-1]
            found.append((name, shape, *self._unpack("<IQ")))
        align = self.metadata.get("general.alignment", 32)
        base = -(-self._at // align) * align
        tensors = {}
        for name, shape, kind, offset in found:
            if kind not in _KINDS:
                known = ", ".join(label for label, _, _ in _KINDS.values())
                raise ModelRefused(f"{self._name}: {name} is quantized in a way (type {kind}) that isn't read; {known} are")
            label, numbers, size = _KINDS[kind]
            count = math.prod(shape) // numbers * size
            tensors[name] = (label, shape, np.frombuffer(self._map, np.uint8, count, base + offset))
        return tensors

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        self._at += size
        return self._map[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack("<" + _SCALARS[kind])[0]
        item, count = self._unpack("<IQ")
        if item in _SCALARS:
            return list(self._unpack(f"<{count}{_SCALARS[item]}"))
        return [self._value(item) for _ in range(count)]


def _dequantized(kind: str, raw: Bytes) -> Floats:
    """The numbers of a tensor in order, float32. Q8_0: 32 int8 and a scale; Q4_1: 32 nibbles, a scale and a lowest value."""
    match kind:
        case "F32":
            return raw.view(np.float32)
        case "F16":
            return raw.view(np.float16).astype(np.float32)
        case "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "Q8_0":
            blocks = raw.reshape(-1, 34)
            scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            return blocks[:, 2:].view(np.int8) * scale
        case _:
            blocks = raw.reshape(-1, 20)
            scale, lowest = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
            quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            numbers: Floats = quants * scale + lowest
            return numbers


def _unpermuted(weight: Floats, heads: int) -> Floats:
    """GGUF interleaves the two rotary halves of q and k (rows); Hugging Face keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
