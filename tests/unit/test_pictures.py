"""Image files of every kind become upright RGB pictures; what can't be read is refused with its reason, before decoding."""

import struct
import zlib
from collections.abc import Callable

import numpy
import pytest
from PIL import Image

from multi_model.predictors.pictures import BadPicture, decode, middle
from tests.unit.images_for_tests import file, picture, sixteen_bits, transparent

LIMIT = 1_000_000


def same(one: Image.Image, other: Image.Image, tolerance: int = 0) -> bool:
    a, b = (numpy.asarray(image).astype(int) for image in (one, other))
    return a.shape == b.shape and int(abs(a - b).max()) <= tolerance


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "LA", "RGBA", "PA"])
def test_every_mode_becomes_the_rgb_that_it_stands_for(mode: str) -> None:
    image = picture().convert(mode)
    found = decode(file(image, "TIFF" if mode == "PA" else "PNG"), LIMIT)
    assert found.mode == "RGB"
    assert same(found, image.convert("RGB"))


@pytest.mark.parametrize(("kind", "tolerance"), [("PNG", 0), ("BMP", 0), ("TIFF", 0), ("WEBP", 24), ("JPEG", 24), ("GIF", 60)])
def test_every_format_is_read(kind: str, tolerance: int) -> None:
    assert same(decode(file(picture(), kind), LIMIT), picture(), tolerance)


def test_grey_and_cmyk_jpegs_and_half_transparent_pngs() -> None:
    grey = picture().convert("L")
    assert same(decode(file(grey, "JPEG"), LIMIT), grey.convert("RGB"), 24)
    assert same(decode(file(picture().convert("CMYK"), "JPEG", quality=95), LIMIT), picture(), 24)
    assert same(decode(file(transparent()), LIMIT), transparent().convert("RGB"))


def test_sixteen_bits_keep_their_upper_eight() -> None:
    deep, plain = sixteen_bits()
    for kind in ("PNG", "TIFF"):
        assert same(decode(file(deep, kind), LIMIT), plain.convert("RGB"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_held_otherwise_gives_an_upright_picture(orientation: int) -> None:
    turned: dict[int, Callable[[Image.Image], Image.Image]] = {
        1: lambda image: image,
        2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
        4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
        6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
        7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
        8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert same(decode(file(turned[orientation](picture()), exif=exif), LIMIT), picture())


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [picture(seed=seed) for seed in range(3)]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    moving = file(frames[0], kind, save_all=True, append_images=frames[1:], **lossless)
    assert same(decode(moving, LIMIT), frames[0], 60 if kind == "GIF" else 0)


def _png_of(width: int, height: int) -> bytes:
    """A head that promises so many pixels, and next to nothing after it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"You have won a prize", "is no image"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is no image"),
        (file(picture(), "JPEG")[:-128], "truncated"),
        (file(picture(640, 480), "PNG")[: len(file(picture(640, 480), "PNG")) // 2], "can't be read"),
        (file(picture(), "GIF")[:-400], "can't be read"),
        (file(picture(), "TIFF")[:900], "can't be read|is no image"),
        (file(picture(), "WEBP")[:60], "can't be read|is no image"),
        (file(picture(), "PPM"), "is no image"),
        (file(picture(1001, 1000)), "1001 x 1000 pixels, at most 1000000"),
        (_png_of(65_000, 65_000), "65000 x 65000 pixels"),
        (_png_of(900, 900), "can't be read"),
        (file(Image.new("F", (9, 9)), "TIFF"), "no agreed black and white"),
        (file(Image.new("I", (9, 9)), "TIFF"), "no agreed black and white"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(BadPicture, match=reason):
        decode(data, LIMIT)


def test_only_the_middle_is_kept_of_what_is_very_long() -> None:
    assert middle(picture(61, 43)).size == (61, 43)
    assert middle(picture(3, 4000)).size == (3, 12)
    assert middle(picture(4001, 1)).size == (4, 1)
    strip = Image.new("L", (100, 1))
    strip.putpixel((50, 0), 255)
    assert 255 in numpy.asarray(middle(strip))
