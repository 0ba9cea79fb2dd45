"""Tiny random checkpoints of several architectures, made offline in milliseconds each."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

_TEXT = ["The quick brown fox jumps over the lazy dog. 0123456789 émigré 日本語 🙂\n"] * 8
_VOCABULARY = 320  # 256 bytes, 3 specials, 61 merges
_IDS = {"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    **_IDS,
}
_GROUPED = {"num_key_value_heads": 2, **_SIZES}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GROUPED},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **_GROUPED},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, **_IDS},
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        **_IDS,
    },
    "qwen2": {"model_type": "qwen2", **(_GROUPED | {"vocab_size": 384})},  # more rows than tokens, as the real ones have
    "qwen3": {"model_type": "qwen3", "head_dim": 16, **_GROUPED},
    "mistral-window": {"model_type": "mistral", "sliding_window": 16, **_GROUPED},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 2.0, **_GROUPED},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **_GROUPED,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
        **_GROUPED,
    },
    "phi": {"model_type": "phi", **_GROUPED},
    "phi3": {"model_type": "phi3", **_GROUPED},
    "gpt-neox": {"model_type": "gpt_neox", **_SIZES},
    "bloom": {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, **_IDS},
    "mamba": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, **_IDS},
    "falcon": {"model_type": "falcon", "alibi": True, **_SIZES},
    "minimax": {"model_type": "minimax", **_GROUPED},
    "doge": {"model_type": "doge", **_GROUPED},
    "diffllama": {"model_type": "diffllama", **_GROUPED},
}


def tokenizer() -> Tokenizer:
    """Byte-level BPE: any text encodes, and decodes back exactly."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<bos>", "<eos>"],
    )
    bpe.train_from_iterator(_TEXT, trainer)
    return bpe


def causal_lm(name: str, folder: Path, seed: int = 0) -> Path:
    """A float32 checkpoint. initializer_range 0.2 spreads the logits, so that greedy text is not one repeated token."""
    options = dict(TINY[name])
    torch.manual_seed(seed)
    config = AutoConfig.for_model(options.pop("model_type"), initializer_range=0.2, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def text_classifier(folder: Path, labels: tuple[str, ...] = ("HAM", "SPAM"), seed: int = 0) -> Path:
    """A float32 BERT of 512 positions, whose answers differ from text to text."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "bert",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        vocab_size=_VOCABULARY,
        pad_token_id=0,
        initializer_range=0.5,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    framed = tokenizer()
    framed.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    framed.save(str(folder / "tokenizer.json"))
    return folder
