"""A checkpoint folder becomes a model in memory, with our attention in it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llm.attention import base
from llm.exceptions import ModelRefused
from llm.light_imports import light_imports

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LONGEST_REASON = 300  # characters of a library's own words


def choose_device(asked: str) -> torch.device:
    """Raises ModelRefused for a device that isn't there."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(asked)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelRefused(f"there is no {asked} here")
    return device


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the device computes in it, else float32 (float16 on an older GPU)."""
    if asked != "auto":
        return DTYPES[asked]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Raises ModelRefused where transformers can't build it with an attention of ours."""
    base.register()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model, report = _build(folder, config, dtype)
    except Exception as error:  # those of transformers, safetensors and the config's checks have no common base
        raise ModelRefused(f"{folder.name} can't be loaded: {_reason(error)}") from error
    if report["missing_keys"]:  # transformers would go on with random numbers there
        raise ModelRefused(f"{folder.name} lacks {_named(report['missing_keys'])}")
    if report["mismatched_keys"]:
        names = [name for name, *_ in report["mismatched_keys"]]
        raise ModelRefused(f"{folder.name} has other shapes than its config.json says: {_named(names)}")
    if not model._supports_attention_backend:
        raise ModelRefused(f"{folder.name} is a {config.model_type} model, whose attention can't be replaced by a paged one")
    model.to(device)  # type: ignore[arg-type]
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _build(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """-> the model, and what transformers says of tensors that the checkpoint lacks or has in another shape"""
    with light_imports():
        built: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=base.NAME,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, report = built
    return model, report


def context_length(config: PreTrainedConfig, asked: int | None) -> int:
    """Raises ModelRefused where more is asked for than the model has, or nobody says."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    if asked is None and own is None:
        raise ModelRefused("the model's config names no context length; set --max-model-len")
    if asked is not None and own is not None and asked > own:
        raise ModelRefused(f"--max-model-len is {asked}, and the model's context is {own} tokens")
    return asked or own or 0


def end_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """What the checkpoint says ends a text: its generation_config.json and its config.json, an id or a list of ids."""
    ids = _as_ids(getattr(config, "eos_token_id", None))
    path = folder / "generation_config.json"
    if path.is_file():
        ids |= _as_ids(json.loads(path.read_text()).get("eos_token_id"))
    return tuple(sorted(ids))


def _as_ids(given: Any) -> set[int]:
    if given is None:
        return set()
    return set(given) if isinstance(given, list) else {given}


def _cpu_has_bfloat16() -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.is_file() and any(flag in flags.read_text().split() for flag in ("avx512_bf16", "amx_bf16"))


def _reason(error: Exception) -> str:
    """In one line."""
    if isinstance(error, KeyError):
        if error.args == (base.NAME,):  # looked up among the attentions that the model brings along
            return "its attention can't be replaced by a paged one"
        return f"transformers doesn't know {error}"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _named(tensors: Collection[str]) -> str:
    first, *more = sorted(tensors)
    return f"{first} and {len(more)} more tensors" if more else first
