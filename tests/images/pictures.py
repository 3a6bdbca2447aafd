"""Picture files of every kind that is read, made by Pillow: the same in every run."""

import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

SIZES = [(1, 1), (1, 50), (70, 2), (3, 200), (224, 224), (225, 301), (640, 480), (333, 1000), (37, 21)]
ORIENTATION = 0x0112  # the tag in EXIF data
# How files are written: Pillow's mode, format and options.
KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("RGB", "PNG", {}), ("L", "PNG", {}), ("LA", "PNG", {}), ("RGBA", "PNG", {}), ("P", "PNG", {}),
    ("P", "PNG", {"transparency": bytes(range(256))}), ("1", "PNG", {}), ("I;16", "PNG", {}), ("RGBA", "PNG", {"save_all": True}),
    ("RGB", "JPEG", {"quality": 75}), ("RGB", "JPEG", {"quality": 95, "progressive": True}), ("L", "JPEG", {}), ("CMYK", "JPEG", {}),
    ("RGB", "WEBP", {"quality": 80}), ("RGBA", "WEBP", {"lossless": True}), ("RGB", "WEBP", {"save_all": True}),
    ("P", "GIF", {}), ("P", "GIF", {"transparency": 3}), ("P", "GIF", {"save_all": True}), ("RGB", "BMP", {}), ("P", "BMP", {}),
    ("RGB", "TIFF", {}), ("RGB", "TIFF", {"compression": "tiff_lzw"}), ("CMYK", "TIFF", {"compression": "tiff_adobe_deflate"}), ("I;16", "TIFF", {}),
]  # fmt: skip


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture in RGB with large and small shapes."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    grain = Image.fromarray(rng.integers(0, 256, (min(height, 300), min(width, 300), 3), np.uint8))
    return Image.blend(coarse, grain.resize((width, height), Image.Resampling.NEAREST), 0.25)


def written(
    picture: Image.Image, mode: str = "RGB", format: str = "PNG", orientation: int = 1, **options: Any
) -> bytes:
    """Return the file of a picture; with `save_all` it is animated."""
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    elif mode in ("RGBA", "LA"):
        picture = picture.convert("RGBA")
        picture.putalpha(picture.getchannel("G"))
        picture = picture.convert(mode)
    else:
        picture = picture.convert(mode)
    if options.get("save_all"):
        options["append_images"] = [picture.transpose(Image.Transpose.ROTATE_180)]
    if orientation != 1:
        options["exif"] = Image.Exif()
        options["exif"][ORIENTATION] = orientation
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


@cache
def varied() -> tuple[tuple[str, bytes], ...]:
    """Return 200 files with their names: every kind in several sizes, turned ones, and a large one."""
    return tuple(_varied())


def _varied() -> Iterator[tuple[str, bytes]]:
    for number, (mode, kind, options) in enumerate(KINDS):
        for step in range(7):
            size = SIZES[(number + step) % len(SIZES)]
            yield f"{kind} {mode} {options} {size}", written(drawn(*size, seed=number), mode, kind, **options)
    for orientation in range(1, 9):
        for kind in ("JPEG", "PNG", "WEBP"):
            yield f"{kind} turned {orientation}", written(drawn(300, 200), format=kind, orientation=orientation)
    yield "large JPEG", written(drawn(8000, 6000), format="JPEG")
