"""From an encoded image to the numbers that a vision tower reads: decoded, upright, RGB, resized, cropped, scaled and normalized.

All steps are those of transformers' image processors of CLIP and SigLIP that compute with Pillow (PilBackend in
transformers/image_processing_backends.py), in their order, so the numbers are equal bit by bit.
"""

import io
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from weir.errors import InvalidRequest, SettingsError, add_extra
from weir.images import Header, ImageLimits, check_pixels, look

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
_LONGEST = 16  # times as long as wide: of what is longer, a crop keeps less

Side = Annotated[int, Meta(ge=1, le=4096)]  # in pixels
Size = Side | dict[str, Side]
Positive = Annotated[float, Meta(gt=0)]


class _Config(msgspec.Struct):
    """The settings that the files of a checkpoint state, by their keys; the rest is as the processor does it."""

    size: Size
    crop_size: Size
    do_center_crop: bool
    image_mean: tuple[float, float, float]
    image_std: tuple[Positive, Positive, Positive]
    do_resize: bool = True
    resample: Annotated[int, Meta(ge=0, le=5)] = 3
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True


_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_SQUARE, _HALF = {"height": 224, "width": 224}, (0.5, 0.5, 0.5)
# What each processor does where no file states it.
_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "CLIP": {"size": 224, "crop_size": 224, "do_center_crop": True, **_CLIP},
    "Siglip": {"size": _SQUARE, "crop_size": 224, "do_center_crop": False, "image_mean": _HALF, "image_std": _HALF},
}
_ENDINGS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_CLASSES = {f"{name}{ending}": name for name in _PROCESSORS for ending in _ENDINGS}


@dataclass(frozen=True)
class Preparation:
    """How images become numbers.

    Attributes:
        height, width: of every result, in pixels.
        shortest: the image is resized so that its shorter side has this many pixels, and cropped; None if it is resized to height and width.
        resample: the filter, by Pillow's number.
        scale: what a pixel's value, 0 to 255, is multiplied by.
        mean, deviation: what is subtracted of each channel after that, and what it is divided by then.
    """

    height: int
    width: int
    shortest: int | None
    resample: int
    scale: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    @cached_property
    def _numbers(self) -> NDArray[np.float32]:
        """The number for each value of each channel, [3, 256]."""
        scaled = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, deviation = (np.array(each, np.float32)[:, None] for each in (self.mean, self.deviation))
        return (scaled - mean) / deviation

    def prepare(self, data: bytes, limits: ImageLimits) -> NDArray[np.float32]:
        """Return the numbers of an image file, [3, height, width]; of an animation, those of its first frame.

        Raises InvalidRequest for an image beyond `limits`, and for one that cannot be decoded.
        """
        pixels = np.asarray(self._fitted(_decoded(data, limits)))
        numbers = np.empty((3, self.height, self.width), np.float32)
        for channel, row in enumerate(self._numbers):  # a byte is always an index, so checking it would only take time
            np.take(row, pixels[:, :, channel], out=numbers[channel], mode="clip")
        return numbers

    def _fitted(self, image: "Image") -> "Image":
        """Return the image resized, and cropped around its middle; where it is smaller than the crop, with black around it."""
        if self.shortest is None:
            return image.resize((self.width, self.height), self.resample)
        # The middle of a long image is enough: the whole of one might be resized to gigabytes.
        sizes = [int(self.shortest * side / min(image.size)) for side in image.size]
        width, height = [min(size, _LONGEST * self.shortest + size % 2) for size in sizes]
        left, right = [(sizes[0] + sign * width) // 2 * image.width / sizes[0] for sign in (-1, 1)]
        top, bottom = [(sizes[1] + sign * height) // 2 * image.height / sizes[1] for sign in (-1, 1)]
        resized = image.resize((width, height), self.resample, (left, top, right, bottom))
        x, y = (width - self.width) // 2, (height - self.height) // 2
        return resized.crop((x, y, x + self.width, y + self.height))


@cache
def _silence() -> None:
    """Let Pillow not warn about metadata, which are the caller's business. Once in a process: threads decode at the same time."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _decoded(data: bytes, limits: ImageLimits) -> "Image":
    """Return the image in RGB, turned as its EXIF data state. Raises InvalidRequest."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = look(data, limits).format
    _silence()
    try:
        with Image.open(io.BytesIO(data), formats=[name]) as image:
            check_pixels(Header(name, *image.size), limits)  # its frames may be larger than the header states
            image.load()
            with suppress(Exception):  # broken EXIF data turn nothing
                ImageOps.exif_transpose(image, in_place=True)
            return image if image.mode == "RGB" else image.convert("RGB")
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise InvalidRequest(f"this {name} cannot be decoded: its header is broken") from None
    except Exception as error:  # decoders raise what they like
        raise InvalidRequest(f"this {name} cannot be decoded: {error or type(error).__name__}") from None


def read_preparation(directory: Path) -> Preparation | None:
    """Return how images are prepared for the checkpoint in `directory`; None if no file there states it.

    Raises SettingsError naming the file, the key and the rule, and if Pillow is not installed.
    """
    for name, key in ((PROCESSOR, "image_processor"), (PREPROCESSOR, None)):
        path = directory / name
        try:
            stated = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
            stated = stated if key is None else msgspec.convert(stated.get(key) or {}, dict[str, Any])
            if stated:
                return _preparation(stated)
        except OSError as error:
            raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise SettingsError(f"{path}: {error}") from None
    return None


def _preparation(stated: Mapping[str, Any]) -> Preparation:
    """Return the preparation that a checkpoint states. Raises ValidationError for other processors, and for values that break a rule."""
    if find_spec("PIL") is None:
        raise SettingsError(f"images need Pillow; {add_extra('images')}")
    kind = stated.get("image_processor_type") or stated.get("feature_extractor_type")
    if kind not in _CLASSES:
        known = ", ".join(f"{name}ImageProcessor" for name in _PROCESSORS)
        raise msgspec.ValidationError(f"image_processor_type={kind!r}: must be one of {known}")
    given = {key: value for key, value in stated.items() if value is not None}
    config = msgspec.convert({**_PROCESSORS[_CLASSES[kind]], **given}, _Config)
    size, crop = (
        each if isinstance(each, dict) else dict.fromkeys(keys, each)
        for each, keys in ((config.size, ("shortest_edge",)), (config.crop_size, ("height", "width")))
    )
    shortest = size.get("shortest_edge")
    fixed = crop if config.do_center_crop else size
    is_known = config.do_resize and size in (fixed, {"shortest_edge": shortest})
    if not is_known or fixed.keys() != {"height", "width"}:
        facts = f"do_resize={config.do_resize}, size={size}, do_center_crop={config.do_center_crop}, crop_size={crop}"
        raise msgspec.ValidationError(f"{facts}: must give all images one height and one width")
    scale = config.rescale_factor if config.do_rescale else 1.0
    mean = config.image_mean if config.do_normalize else (0.0, 0.0, 0.0)
    deviation = config.image_std if config.do_normalize else (1.0, 1.0, 1.0)
    return Preparation(fixed["height"], fixed["width"], shortest, config.resample, scale, mean, deviation)
