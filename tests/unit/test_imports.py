"""Who may import whom, and how light the API process stays."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = ("sequence", "block_manager", "workload_manager", "messages", "batch", "exceptions", "stops", "observer", "config")
PACKED = {("batch", "numpy")}  # what it packs into
WEB = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_settings", "sse_starlette", "prometheus_client"}
HEAVY = {"torch", "transformers"}
OURS = {path.stem for path in ROOT.glob("*.py")} | {"openai_api", "multi_model"}


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, wherever in it; those for type checking only are left out."""
    tree = ast.parse(path.read_text())
    only_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("name", PURE)
def test_pure_cores_need_only_the_standard_library_and_each_other(name: str) -> None:
    path = ROOT / "llm" / f"{name}.py"
    if not path.exists():
        pytest.fail(f"{path.name} is not there any more: take it off the list")
    for module in imported(path):
        top = module.split(".")[0]
        assert top in sys.stdlib_module_names or module in {f"llm.{pure}" for pure in PURE} or (name, top) in PACKED


@pytest.mark.parametrize("path", sorted((ROOT / "llm").rglob("*.py")), ids=lambda path: path.stem)
def test_the_engine_knows_nothing_of_the_web(path: Path) -> None:
    assert not tops(path) & WEB
    assert not tops(path) & (OURS - {"logs", "resources"})


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.stem)
def test_the_api_process_writes_no_tensor(path: Path) -> None:
    assert not tops(path) & HEAVY


@pytest.mark.parametrize(
    ("name", "forbidden"),
    [
        ("settings", {"app", "containers", "endpoints", "server", "fastapi", "starlette", "uvicorn"}),
        ("containers", {"endpoints", "app", "dtos", "streaming", "fastapi"}),
        ("dtos", {"containers", "endpoints", "streaming", "errors", "fastapi", "starlette"}),
        ("endpoints", {"middleware", "server", "uvicorn", "settings"}),
        ("errors", {"endpoints", "dtos", "streaming", "middleware", "containers"}),
        ("streaming", {"endpoints", "dtos", "containers", "settings"}),
        ("middleware", {"endpoints", "dtos", "containers", "fastapi"}),
        ("logs", WEB | {"llm"}),
        ("metrics", {"fastapi", "starlette", "llm"}),
    ],
)
def test_each_part_of_the_http_side_keeps_to_its_own(name: str, forbidden: set[str]) -> None:
    assert not tops(ROOT / f"{name}.py") & forbidden


@pytest.mark.parametrize("name", ["endpoints", "streaming", "middleware", "app", "bodies", "dtos", "containers"])
def test_only_errors_knows_statuses(name: str) -> None:
    numbers = {node.value for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())) if isinstance(node, ast.Constant)}
    assert not {number for number in numbers if isinstance(number, int) and 400 <= number < 600}


def test_workers_may_import_main_again_for_nothing() -> None:
    tree = ast.parse((ROOT / "main.py").read_text())
    at_the_top = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in tree.body
                  if isinstance(node, ast.Import | ast.ImportFrom)}  # fmt: skip
    assert at_the_top <= set(sys.stdlib_module_names)


def test_no_folder_shadows_a_package() -> None:
    assert not {"triton", "openai", "vllm", "torch"} & {path.name for path in ROOT.iterdir()}


def test_the_api_process_is_light() -> None:
    """With everything it ever imports, and a tokenizer of 50,000 tokens, below 200 MB."""
    script = """
import sys
from pathlib import Path
import main, settings, app, containers, endpoints, server, llm.llm, uvicorn.protocols.http.h11_impl
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.WordLevel({f"word{i}": i for i in range(50_000)}, "word0"))
heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(sorted(heavy), int(status["VmHWM"].split()[0]) // 1024)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    heavy, _, megabytes = ran.stdout.strip().rpartition(" ")
    assert heavy == "[]"
    assert int(megabytes) < 200
