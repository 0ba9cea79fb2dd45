"""An image file becomes a picture of three colours, upright; whatever is wrong with it is found here, before anything is
computed from it."""

import io

import numpy
from PIL import Image, ImageOps, UnidentifiedImageError

Image.MAX_IMAGE_PIXELS = None  # the check is ours, and refuses before it decodes
_FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_NUMBERS = ("I", "F")  # whose black and white are nobody's convention
_LONGEST_REASON = 200  # characters
_MOST_STRETCHED = 4  # of a long side to a short one


class BadPicture(Exception):
    """Why, as the rest of a sentence."""


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """-> mode RGB; of an animation the first frame. Raises BadPicture.

    Transparent pixels keep the colour that is under them, and 16 bits a channel become 8.
    """
    if not data:
        raise BadPicture("is empty")
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise BadPicture(f"is no image that is read here ({', '.join(_FORMATS)})") from None
    except Exception as error:  # six formats' readers raise whatever they stumble over
        raise _unreadable(error) from None
    width, height = image.size
    if width * height > max_pixels:
        raise BadPicture(f"has {width} x {height} pixels, at most {max_pixels} in all")
    if image.mode in _NUMBERS:
        raise BadPicture(f"has pixels of a kind ({image.mode}) that has no agreed black and white")
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
    except Exception as error:  # as above
        raise _unreadable(error) from None
    if image.mode in _SIXTEEN_BITS:
        image = Image.fromarray((numpy.asarray(image) >> 8).astype(numpy.uint8))
    return image.convert("RGB")


def middle(image: Image.Image) -> Image.Image:
    """Cuts the ends off one that is very long, which models that look at the middle square never see: scaled up as it is,
    3 x 4000 pixels would become a hundred million."""
    width, height = image.size
    longest = _MOST_STRETCHED * min(width, height)
    if max(width, height) <= longest:
        return image
    left, top = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    return image.crop((left, top, left + min(width, longest), top + min(height, longest)))


def _unreadable(error: Exception) -> BadPicture:
    reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
    return BadPicture(f"can't be read: {reason}")
