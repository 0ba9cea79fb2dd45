"""Images by reference: strict data URLs, and paths that stay under the root whatever they are spelled like."""

import os
import time
from pathlib import Path

import pytest

from llm.exceptions import InvalidRequest
from multi_model.image_references import ImageReader, data_url

DATA = bytes(range(250))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "R"
    (root / "sub").mkdir(parents=True)
    beside = tmp_path / "R_private"
    beside.mkdir()
    for file in (root / "ok.png", root / "sub" / "ok.png", beside / "x.png"):
        file.write_bytes(DATA)
    (root / "out.png").symlink_to(beside / "x.png")
    (root / "outside").symlink_to(beside)
    (root / "in.png").symlink_to(root / "ok.png")
    os.mkfifo(root / "pipe")
    return root


def read(root: Path | None, *references: str, max_bytes: int = 1000, max_total: int = 2000) -> tuple[bytes, ...]:
    names = [f"input_data[{i}]" for i in range(len(references))]
    return ImageReader(root, max_bytes, max_total).read(list(references), names)


@pytest.mark.parametrize("path", ["ok.png", "sub/ok.png", "sub/../ok.png", "./sub//ok.png", "in.png"])
def test_files_under_the_root_are_read(root: Path, path: str) -> None:
    assert read(root, path, str(root / path)) == (DATA, DATA)


def test_every_other_path_gets_the_same_answer_and_soon(root: Path) -> None:
    told = set()
    began = time.monotonic()
    for path in (
        "../R_private/x.png",
        str(root.parent / "R_private" / "x.png"),
        "out.png",
        "outside/x.png",
        "ok.png\0.png",
        f"file://{root}/ok.png",
        "sub",
        "",
        ".",
        "x" * 10_000,
        "x/" * 5_000,
        "pipe",
        "missing.png",
        "/dev/zero",
        "/proc/self/environ",
        "\ud800",
    ):
        with pytest.raises(InvalidRequest) as refused:
            read(root, path)
        told.add((refused.value.message, refused.value.param))
    assert len(told) == 1
    assert time.monotonic() - began < 2


def test_without_a_root_no_path_is_looked_at(root: Path) -> None:
    for path in ("ok.png", str(root / "ok.png"), "missing.png", "aGVsbG8="):
        with pytest.raises(InvalidRequest, match="takes no paths"):
            read(None, path)


def test_data_urls_are_read_strictly() -> None:
    assert read(None, data_url(DATA, "png"), data_url(DATA[:1], "x.y+z"), "DATA:IMAGE/PNG;base64,AAA=") == (
        DATA,
        DATA[:1],
        b"\0\0",
    )
    assert read(None, "data:image/jpeg;base64,") == (b"",)
    for wrong in (
        "data:text/plain;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64,AAA",
        "data:image/png;base64,AA AA",
        "data:image/png;base64,AAAA\n",
        "data:image/png;base64,AAA=AAA=",
        "data:image/png;base64,AA_-",
        "data:image/png;base64,ÄAAA",
        "data:",
    ):
        with pytest.raises(InvalidRequest) as refused:
            read(None, data_url(DATA, "png"), wrong)
        assert refused.value.param == "input_data[1]"


def test_sizes_are_bounded_each_and_together(root: Path) -> None:
    for reference in ("ok.png", data_url(DATA, "png")):
        assert read(root, reference, max_bytes=250) == (DATA,)
        with pytest.raises(InvalidRequest, match=r"input_data\[0\] has 250 bytes, at most 249"):
            read(root, reference, max_bytes=249)
        with pytest.raises(InvalidRequest, match=r"input_data\[2\]: the images of one request .* 749 bytes"):
            read(root, *[reference] * 3, max_total=749)
