"""A GGUF file gives the weights, config and tokenizer that it holds; what isn't read is refused by name."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llm.exceptions import ModelRefused
from llm.gguf import Gguf
from llm.model_manager import _bfloat16, _embedded
from tests.unit.gguf_for_tests import (
    BF16,
    F16,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Q4_1,
    Q8_0,
    WORDS,
    Tensor,
    metadata,
    tensors,
    values,
    write,
)

_HEAD_SIZE = HIDDEN // HEADS


class TestWeights:
    def test_each_comes_under_its_name_with_its_numbers(self, tmp_path: Path) -> None:
        weights = tensors()
        read = dict(Gguf(write(tmp_path / "tiny.gguf", weights=weights)).weights())
        assert len(read) == len(weights)
        for theirs, ours in {
            "token_embd": "model.embed_tokens",
            "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
            "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
            "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
            "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
            "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
            "blk.0.attn_norm": "model.layers.0.input_layernorm",
            "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
            "output_norm": "model.norm",
        }.items():
            assert np.array_equal(read[f"{ours}.weight"], values(weights[f"{theirs}.weight"])), theirs

    @pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
    def test_the_halves_that_rotate_together_are_kept_apart(self, part: str, heads: int, tmp_path: Path) -> None:
        """A rotation pairs rows 2i and 2i + 1 of a head in GGUF, and rows i and i + half in Hugging Face's models."""
        weights = tensors()
        theirs = values(weights[f"blk.0.attn_{part}.weight"])
        gguf = Gguf(write(tmp_path / "tiny.gguf", weights=weights))
        ours = dict(gguf.weights())[f"model.layers.0.self_attn.{part}_proj.weight"]
        for head in range(heads):
            for i in range(_HEAD_SIZE // 2):
                for half in (0, 1):
                    to, place = head * _HEAD_SIZE + half * _HEAD_SIZE // 2 + i, head * _HEAD_SIZE + 2 * i + half
                    assert np.array_equal(ours[to], theirs[place])

    @pytest.mark.parametrize(
        ("kind", "block", "expected"),
        [
            (F16, struct.pack("<32e", *(i / 8 for i in range(32))), [i / 8 for i in range(32)]),
            (BF16, b"".join(struct.pack("<f", i / 8)[2:] for i in range(32)), [i / 8 for i in range(32)]),
            (Q8_0, struct.pack("<e32b", 0.5, *range(-16, 16)), [i / 2 for i in range(-16, 16)]),
            (
                Q4_1,  # a byte holds numbers i and i + 16, the lower half first
                struct.pack("<ee16B", 0.25, -1.0, *(i | (15 - i) << 4 for i in range(16))),
                [i / 4 - 1 for i in [*range(16), *reversed(range(16))]],
            ),
        ],
    )
    def test_quantized_numbers(self, kind: int, block: bytes, expected: list[float], tmp_path: Path) -> None:
        weights: dict[str, Tensor] = {"output_norm.weight": (kind, (2, 32), block * 2)}
        [(_, read)] = Gguf(write(tmp_path / "tiny.gguf", weights=weights)).weights()
        assert read.dtype == np.float32
        assert read.tolist() == [expected, expected]


class TestConfigAndTokenizer:
    def test_the_config_is_what_the_file_says(self, tmp_path: Path) -> None:
        config = Gguf(write(tmp_path / "tiny.gguf", metadata(llama__rope__freq_base=500.0))).config()
        assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
        assert config["rms_norm_eps"] == pytest.approx(1e-5)
        expected = {
            "model_type": "llama",
            "vocab_size": len(WORDS),
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
        }
        assert expected.items() <= config.items()

    def test_without_groups_every_head_has_its_own_keys(self, tmp_path: Path) -> None:
        weights = tensors()
        weights["blk.0.attn_k.weight"] = weights["blk.0.attn_q.weight"]
        gguf = Gguf(write(tmp_path / "tiny.gguf", metadata(llama__attention__head_count_kv=None), weights))
        assert gguf.config()["num_key_value_heads"] == HEADS
        read = dict(gguf.weights())
        layer = "model.layers.0.self_attn"
        assert np.array_equal(read[f"{layer}.k_proj.weight"], read[f"{layer}.q_proj.weight"])

    def test_an_output_of_its_own_unties_the_embeddings(self, tmp_path: Path) -> None:
        weights = tensors()
        weights["output.weight"] = weights["token_embd.weight"]
        gguf = Gguf(write(tmp_path / "tiny.gguf", weights=weights))
        assert gguf.config()["tie_word_embeddings"] is False
        assert "lm_head.weight" in dict(gguf.weights())

    def test_text_becomes_the_files_tokens_and_back(self, tmp_path: Path) -> None:
        tokenizer = Gguf(write(tmp_path / "tiny.gguf")).tokenizer()
        assert tokenizer.encode("ab a11<|endoftext|>").ids == [3, 5, 1, 4, 4, 0]
        assert tokenizer.decode([3, 5, 1, 4, 4, 0]) == "ab a11"

    def test_the_default_model(self) -> None:
        gguf = Gguf(_embedded()[0])
        shapes = {name: weight.shape for name, weight in gguf.weights()}
        assert len(shapes) == len(gguf) == 272
        assert shapes["model.embed_tokens.weight"] == (49152, 576)
        assert shapes["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
        tokenizer = gguf.tokenizer()
        text = "<|im_start|>user\nWhat is 12 * 3? émigré 日本語 🙂<|im_end|>"
        encoded = tokenizer.encode(text)
        assert encoded.tokens[0] == "<|im_start|>"
        assert encoded.tokens[-1] == "<|im_end|>"
        assert {"1", "2", "3"} <= set(encoded.tokens)  # digit by digit
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
        assert gguf.tokenizer_config()["eos_token"] == "<|im_end|>"  # noqa: S105
        assert gguf.chat_template is not None


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"general__architecture": "qwen2"}, "holds a qwen2 model; of GGUF files only llama is read"),
            ({"general__architecture": None}, "holds a None model; of GGUF files only llama is read"),
            ({"tokenizer__ggml__pre": "llama-bpe"}, "has a tokenizer of kind gpt2/llama-bpe; of GGUF files only gpt2/smollm"),
            ({"tokenizer__ggml__model": "llama"}, "has a tokenizer of kind llama/smollm"),
            ({"llama__rope__scaling__type": "yarn"}, "scales its rotary positions"),
            ({"llama__attention__head_count": None}, "has no llama.attention.head_count"),
            ({"tokenizer__ggml__tokens": None}, "has no tokenizer.ggml.tokens"),
        ],
    )
    def test_what_it_says_of_itself(self, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
        assert f"tiny.gguf {reason}" in refusal(write(tmp_path / "tiny.gguf", metadata(**changes)))

    def test_an_unknown_tensor(self, tmp_path: Path) -> None:
        weights = tensors()
        weights["blk.0.attn_q.bias"] = weights["output_norm.weight"]
        message = refusal(write(tmp_path / "tiny.gguf", weights=weights))
        assert message == "tiny.gguf has a tensor that isn't known here: blk.0.attn_q.bias"

    def test_an_unknown_quantization(self, tmp_path: Path) -> None:
        message = refusal(write(tmp_path / "tiny.gguf", weights={"output_norm.weight": (12, (256,), bytes(144))}))
        assert message == (
            "tiny.gguf: output_norm.weight is quantized in a way (type 12) that isn't read; F32, F16, Q4_1, Q8_0, BF16 are"
        )

    @pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" + bytes(60), b"GGUF" + struct.pack("<IQQ", 1, 0, 0)])
    def test_another_kind_of_file(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(content)
        assert refusal(path).startswith("tiny.gguf is no GGUF file")

    def test_a_file_cut_off_anywhere(self, tmp_path: Path) -> None:
        path = write(tmp_path / "tiny.gguf")
        whole = path.read_bytes()
        for size in [*range(24, 1200, 7), len(whole) // 2, len(whole) - 33]:
            path.write_bytes(whole[:size])
            assert refusal(path).startswith("tiny.gguf is damaged or cut off: "), size

    def test_a_damaged_head_is_read_or_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "tiny.gguf")
        whole = path.read_bytes()
        rng = random.Random(0)  # noqa: S311
        refused = 0
        for _ in range(300):
            damaged = bytearray(whole)
            damaged[rng.randrange(4, 1400)] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                Gguf(path)
            except ModelRefused:
                refused += 1
        assert refused > 100


def refusal(path: Path) -> str:
    with pytest.raises(ModelRefused) as refused:
        Gguf(path)
    return refused.value.message


def test_weights_are_kept_in_bfloat16_to_the_nearest_and_a_tie_to_even() -> None:
    step = 2.0**-7  # between bfloat16 numbers from 1 to 2
    given = {
        1.0: 1.0,
        1 + step / 4: 1.0,
        1 + step / 2: 1.0,  # a tie: the even neighbour is below
        1 + step * 3 / 4: 1 + step,
        1 + step * 3 / 2: 1 + 2 * step,  # a tie: the even neighbour is above
        -(1 + step * 3 / 2): -(1 + 2 * step),
        3.4e38: float("inf"),
        0.0: 0.0,
    }
    floats: NDArray[np.float32] = np.array(list(given), np.float32)
    kept = (_bfloat16(floats).astype(np.uint32) << 16).view(np.float32)
    assert kept.tolist() == list(given.values())
