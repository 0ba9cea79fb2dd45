"""The documents name files that exist, and the structure page leaves none out."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs/architecture.md"
PATH = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[\w.-]+(?:\.(?:py|md|toml|yml)|/))(?![\w/])")


def named_paths(document: Path) -> set[str]:
    return set(PATH.findall(document.read_text()))


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_each_file_that_a_document_names_exists(document: Path) -> None:
    named = named_paths(document)
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_structure_page_names_every_module() -> None:
    modules = {*ROOT.glob("*.py"), *(ROOT / "llm").rglob("*.py"), *(ROOT / "multi_model").rglob("*.py")}
    names = {str(path.relative_to(ROOT)) for path in modules if path.name != "__init__.py"}
    assert names - named_paths(ARCHITECTURE) == set()
