"""Pictures in every form that files come in."""

import io
from typing import Any

import numpy
from PIL import Image


def picture(width: int = 61, height: int = 43, seed: int = 0) -> Image.Image:
    """Coarse colours, so that a lossy format keeps them about as they are."""
    rng = numpy.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=numpy.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def transparent() -> Image.Image:
    image = picture().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def sixteen_bits() -> tuple[Image.Image, Image.Image]:
    """A grey picture of 16 bits, and the same of 8."""
    grey = numpy.asarray(picture().convert("L"))
    return Image.fromarray((grey.astype(numpy.uint16) << 8) | 7), Image.fromarray(grey)
