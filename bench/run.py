"""Our server against static batches, the same prompts, weights and number format: a table for docs/performance.md.

    uv run --with aiohttp python -m bench.run --load-client load.py --baseline static_batch.py --folder CHECKPOINT

`--load-client` is a closed-loop client that speaks our native stream and prints one JSON report; `--baseline` runs a workload's
prompts through transformers' generate() in static batches of four, and prints one, too. `--folder` is a prepared checkpoint,
read by both sides, such as model_cache holds after a start.

Runs are interleaved, so that a machine that gets slower meanwhile slows all alike: in each repeat every workload is run by the
baseline and by each of our variants in turn, each of these by a server of its own. Shown are medians over the repeats.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serving import serving

BASELINE = "static batches of 4"


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    settings: tuple[str, ...]


VARIANTS = {
    "W1": (Variant("one sequence", ("--max-num-seqs", "1")),),
    "W2": (
        Variant("batches of 4", ("--max-num-seqs", "4")),
        Variant("batches of 4, not invariant", ("--max-num-seqs", "4", "--batch-invariant", "off")),
    ),
    "W3": (Variant("batches of 16", ("--max-num-seqs", "16")),),
    "W4": (
        Variant("batches of 32", ("--max-num-seqs", "32")),
        Variant("batches of 32, not invariant", ("--max-num-seqs", "32", "--batch-invariant", "off")),
    ),
    "W5": (Variant("batches of 4", ("--max-num-seqs", "4")),),
    "W6": (Variant("batches of 8", ("--max-num-seqs", "8")),),
}


@dataclass(slots=True)
class Row:
    """What the repeats measured: by a report's key, a value each."""

    speeds: list[float] = field(default_factory=list)  # output tokens per second
    first_token: list[float] = field(default_factory=list)  # ms, median request
    next_token: list[float] = field(default_factory=list)  # ms, median gap
    whole: list[float] = field(default_factory=list)  # ms, median request
    memory: list[float] = field(default_factory=list)  # MiB, all processes


def reported(command: list[str]) -> dict[str, Any]:
    """The JSON object that a command prints. Raises RuntimeError where it fails."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def run_baseline(chosen: argparse.Namespace, workload: str, salt: str, row: Row) -> None:
    options = ["--model", str(chosen.folder), "-w", workload, "--dtype", chosen.dtype, "--salt", salt]
    told = reported([sys.executable, str(chosen.baseline), *options, "--threads", str(chosen.threads)])
    row.speeds.append(told["useful_tok_per_s"])
    row.first_token.append(told["end_to_end_ms"]["p50"])  # there is no stream: the first token comes with the last
    row.whole.append(told["end_to_end_ms"]["p50"])


def run_ours(chosen: argparse.Namespace, workload: str, variant: Variant, salt: str, row: Row) -> None:
    model = ["--model", str(chosen.folder), "--dtype", chosen.dtype, "--threads", str(chosen.threads)]
    with serving(*model, *variant.settings) as server:
        server.wait_ready()
        options = ["--dialect", "native", "--url", server.url, "--tokenizer", str(chosen.folder), "-w", workload]
        load = [sys.executable, str(chosen.load_client), *options, "--pid", str(server.process.pid), "--salt", salt]
        told = reported(load)
    if told["short_answers"] or told["output_tokens"] != told["output_tokens_planned"]:
        raise RuntimeError(f"{workload}: {told['output_tokens']} tokens came, {told['output_tokens_planned']} were asked for")
    row.speeds.append(told["output_tok_per_s"])
    row.first_token.append(told["ttft_ms"]["p50"])
    row.next_token.append(told["itl_ms"]["p50"])
    row.whole.append(told["e2e_ms"]["p50"])
    row.memory.append(told["server_memory"]["peak_pss_mib"])


def measure(chosen: argparse.Namespace) -> dict[tuple[str, str], Row]:
    rows = {(workload, name): Row() for workload in chosen.workloads for name in names(workload)}
    for repeat in range(chosen.repeats):
        salt = f"{time.time_ns()}/{repeat}"  # prompts that no cache has seen; the same for all of this repeat
        for workload in chosen.workloads:
            run_baseline(chosen, workload, salt, rows[workload, BASELINE])
            for variant in VARIANTS[workload]:
                run_ours(chosen, workload, variant, salt, rows[workload, variant.name])
                sys.stderr.write(
                    f"repeat {repeat + 1}, {workload}, {variant.name}: {rows[workload, variant.name].speeds[-1]}\n"
                )
    return rows


def names(workload: str) -> list[str]:
    return [BASELINE, *(variant.name for variant in VARIANTS[workload])]


def table(rows: dict[tuple[str, str], Row]) -> Iterator[str]:
    yield "| workload | | tokens/s | against static | all | first token | next token | whole answer | memory |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (workload, name), row in rows.items():
        speed, base = statistics.median(row.speeds), statistics.median(rows[workload, BASELINE].speeds)
        each = " ".join(f"{one:.1f}" for one in row.speeds)
        times = " | ".join(shown(values, "ms") for values in (row.first_token, row.next_token, row.whole))
        yield f"| {workload} | {name} | {speed:.1f} | {speed / base:.2f} | {each} | {times} | {shown(row.memory, 'MiB')} |"


def shown(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):,.0f} {unit}" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load-client", type=Path, required=True)
    parser.add_argument("--baseline", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", choices=VARIANTS, default=["W2", "W4"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    for name in ("load_client", "baseline", "folder"):
        setattr(chosen, name, getattr(chosen, name).resolve())
    print("\n".join(table(measure(chosen))))


if __name__ == "__main__":
    main()
