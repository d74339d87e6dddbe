"""Opening pictures: a file, bytes, a data URL, a Pillow image or an array becomes one RGB(A) image.

Owns what a picture may be: its format, its size, its number of bits, which way is up, and that it
is whole. Transparency is kept; what shows through it is the processor's business. Never opens a
URL other than ``data:``.
"""

import base64
import binascii
import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import numpy as np

from ..errors import K3Error, UnsupportedError

if TYPE_CHECKING:
    from PIL import Image

# Formats that Pillow reads by itself; some of its others run programs or read anything at all.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "AVIF", "JPEG2000")
# The largest phone photos but one kind have 108 million; in memory it is four bytes for each.
MAX_PIXELS = 120_000_000
MAX_FILE_BYTES = 256 << 20

# What Pillow's decoders are known to raise on damaged files.
_DAMAGE = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    OverflowError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
    struct.error,
    zlib.error,
)


def open_image(source: Any, name: str = "the picture") -> "Image.Image":
    """The picture in ``source``, loaded, upright, in mode RGB or RGBA.

    Args:
        source: a path, the bytes of a file, a ``data:`` URL, a Pillow image, or an array
            ``[H, W]`` or ``[H, W, 1 | 3 | 4]`` of uint8, uint16 or floats from 0 to 1.
        name: what messages call it, if it is no file.

    Raises:
        K3Error: there is no picture, or it is damaged, empty or too large.
        UnsupportedError: it is of a kind that is not read, or Pillow is not installed.
    """
    pillow = _pillow()
    if isinstance(source, str | Path) and not is_data_url(source):
        source, name = read_file(source), str(source)
    if isinstance(source, str):
        source = data_url_bytes(source, name)
    if isinstance(source, bytes):
        return _decode(source, name)
    if isinstance(source, pillow.Image):
        return _finish(source, name)
    if hasattr(source, "__array__") or hasattr(source, "__buffer__"):
        return _from_array(np.asarray(source), name)
    raise K3Error(
        f"{name} is a {type(source).__name__}; give a path, bytes, a Pillow image or an array"
    )


def is_data_url(source: Any) -> bool:
    """Whether ``source`` is a picture by itself, written as a URL."""
    return isinstance(source, str) and source[:5].lower() == "data:"


def data_url_bytes(url: str, name: str = "the picture") -> bytes:
    """What a ``data:`` URL holds.

    Raises:
        K3Error: it is not well formed.
    """
    head, comma, data = url.partition(",")
    if not comma:
        raise K3Error(f"{name}: a data URL has a comma before its data: data:image/png;base64,...")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        raise K3Error(f"{name}: the data URL is not valid base64") from None


def read_file(path: str | Path) -> bytes:
    """A file's bytes.

    Raises:
        K3Error: it is no file, cannot be read, or is too large for a picture.
    """
    path = existing_file(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise K3Error(f"{path} is too large: over {MAX_FILE_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as e:
        raise K3Error(f"{path}: {e.strerror}") from None


def existing_file(path: str | Path) -> Path:
    """The file at ``path``, which may begin with ``~``.

    Raises:
        K3Error: there is none, or it is something else.
    """
    try:
        path = Path(path).expanduser()
        if path.is_file():
            return path
        raise K3Error(f"{path}: {'is no file' if path.exists() else 'there is no such file'}")
    except OSError as e:
        raise K3Error(f"{path}: {e.strerror}") from None
    except (ValueError, RuntimeError):  # a zero byte; a home of nobody
        raise K3Error(f"{str(path)!r} is no path") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UnsupportedError(
            "pictures need Pillow, which is not installed: pip install 'mlx-k3[vision]'"
        ) from None
    return Image


def _decode(data: bytes, name: str) -> "Image.Image":
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise K3Error(f"{name} is empty")
    Image.init()  # Else it may know some formats only.
    with _damage_as_error(name):
        try:
            image = Image.open(io.BytesIO(data), formats=[f for f in FORMATS if f in Image.OPEN])
        except UnidentifiedImageError:
            raise _unknown(data, name) from None
    return _finish(image, name)


@contextmanager
def _damage_as_error(name: str) -> Iterator[None]:
    """For calls of Pillow alone: what its decoders raise becomes one line."""
    from PIL import Image

    try:
        # Files often have quirks, and sizes are checked here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Image.DecompressionBombError:
        raise K3Error(f"{name} has too many pixels; at most {MAX_PIXELS:,} are read") from None
    except _DAMAGE as e:
        raise K3Error(f"{name} is damaged or cut off: {_one_line(e)}") from None


def _unknown(data: bytes, name: str) -> K3Error:
    if data[4:8] == b"ftyp" and data[8:12] in (b"heic", b"heix", b"mif1", b"msf1", b"hevc"):
        return UnsupportedError(f"{name} is a HEIC picture, which is not read; save it as JPEG")
    known = "PNG, JPEG, WebP, GIF, BMP, TIFF, PPM, ICO, AVIF and JPEG 2000"
    return K3Error(f"{name} is no picture, or a damaged one; {known} are read")


def _check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise K3Error(f"{name} has {width} x {height} pixels; a picture has at least 1 x 1")
    if width * height > MAX_PIXELS:
        raise K3Error(
            f"{name} has {width:,} x {height:,} pixels; at most {MAX_PIXELS:,} are read in all"
        )


def _finish(image: "Image.Image", name: str) -> "Image.Image":
    """The whole of ``image`` (its first frame), upright, in RGB or RGBA."""
    from PIL import ImageOps

    _check_size(image.size, name)
    with _damage_as_error(name):
        image.load()
        image = ImageOps.exif_transpose(image)
    return _to_rgb(image, name)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _to_rgb(image: "Image.Image", name: str) -> "Image.Image":
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow itself would cut these off at 255.
        return _from_array(np.asarray(image).clip(0, 65535).astype(np.uint16), name)
    if image.mode == "F":
        raise UnsupportedError(
            f"{name} has 32-bit floats, of which nobody knows what is white; save it as PNG"
        )
    if image.mode == "RGB":
        # Of one colour that stands for "nothing" the release sees the colour.
        return image
    if image.mode == "La":  # Pillow knows no direct way.
        image = image.convert("LA")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _from_array(array: np.ndarray, name: str) -> "Image.Image":
    from PIL import Image

    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise K3Error(
            f"{name}: an array of shape {list(array.shape)}; a picture has [height, width] or "
            "[height, width, 3 or 4]"
        )
    _check_size((array.shape[1], array.shape[0]), name)
    if array.dtype == np.uint16:
        array = ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
    elif np.issubdtype(array.dtype, np.floating):
        if not (array.min() >= 0 and array.max() <= 1):  # NaN is neither
            raise K3Error(f"{name}: an array of floats has values from 0 to 1 only")
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise K3Error(f"{name}: an array of {array.dtype}; uint8, uint16 and floats are read")
    image = Image.fromarray(np.ascontiguousarray(array))
    return image.convert("RGBA" if image.mode == "RGBA" else "RGB")
