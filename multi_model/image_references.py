"""What a caller sends for an image becomes its bytes: a `data:` URL, or a path under the image root.

A path is resolved, and then walked down from the root without following a link: what is opened is what was checked.
"""

import base64
import binascii
import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llm.exceptions import InvalidRequest

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+(;[a-z0-9=._-]+)*;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Any thread. root: the folder that paths are under; None: no paths. max_bytes: of one image; max_total: of a request's."""

    root: Path | None
    max_bytes: int
    max_total: int

    def read(self, references: list[str], names: list[str]) -> tuple[bytes, ...]:
        """names: of the parameters, one for each. Raises InvalidRequest: about a path always the same, whatever is there."""
        images: list[bytes] = []
        left = self.max_total
        for reference, name in zip(references, names, strict=True):
            images.append(self._read(reference, name, left))
            left -= len(images[-1])
        return tuple(images)

    def check_sizes(self, sizes: list[int], names: list[str]) -> None:
        """Of images that came otherwise. Raises as `read`."""
        left = self.max_total
        for size, name in zip(sizes, names, strict=True):
            self._check_size(size, name, left)
            left -= size

    def _read(self, reference: str, name: str, left: int) -> bytes:
        head = _DATA_URL.match(reference)
        if head is not None:
            return self._decoded(reference, head.end(), name, left)
        if reference[:5].lower() == "data:":
            raise InvalidRequest(name, f"{name} must be data:image/…;base64,…")
        if self.root is None:
            raise InvalidRequest(name, f"{name} must be a data:image/…;base64,… URL: this server takes no paths")
        with _opened(self.root, reference) as file:
            if file is None:
                raise InvalidRequest(name, f"{name} is no data:image/…;base64,… URL, and no file under the image root")
            self._check_size(os.fstat(file).st_size, name, left)
            with open(file, "rb", closefd=False) as reader:
                return reader.read(min(self.max_bytes, left))

    def _decoded(self, reference: str, start: int, name: str, left: int) -> bytes:
        self._check_size((len(reference) - start) // 4 * 3 - reference.endswith("=") - reference.endswith("=="), name, left)
        try:
            return binascii.a2b_base64(reference[start:].encode("ascii"), strict_mode=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise InvalidRequest(name, f"{name} isn't valid base64: {error}") from None

    def _check_size(self, size: int, name: str, left: int) -> None:
        if size > self.max_bytes:
            raise InvalidRequest(name, f"{name} has {size} bytes, at most {self.max_bytes}")
        if size > left:
            raise InvalidRequest(name, f"{name}: the images of one request have at most {self.max_total} bytes together")


def data_url(image: bytes, kind: str) -> str:
    """kind: jpeg, png, …"""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


@contextlib.contextmanager
def _opened(root: Path, reference: str) -> Iterator[int | None]:
    """A file descriptor; None for what isn't a regular file under the root, or isn't there."""
    try:
        top = os.path.realpath(root)
        inside = Path(os.path.realpath(os.path.join(top, reference))).relative_to(top)
        file = _walked(top, inside.parts)
    except (OSError, ValueError):  # ValueError: it isn't under the root, or holds a NUL
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)


def _walked(top: str, parts: tuple[str, ...]) -> int:
    """Raises OSError. A pipe or device isn't even opened."""
    *folders, last = parts or (".",)
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            above, at = at, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(above)
        _check_regular(os.stat(last, dir_fd=at, follow_symlinks=False))
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    try:
        _check_regular(os.fstat(file))
    except OSError:
        os.close(file)
        raise
    return file


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError("no regular file")
