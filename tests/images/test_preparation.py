"""Images become the numbers that transformers makes of them; what cannot be decoded is refused by name."""

import io
import json
import tracemalloc
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.images.pictures import drawn, varied, written
from tests.rings import subcases

from weir.errors import InvalidRequest, SettingsError
from weir.images import ImageLimits
from weir.images.preparation import PREPROCESSOR, PROCESSOR, Preparation, read_preparation

LIMITS = ImageLimits()
CLIP = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 40, "crop_size": 32, "resample": 3}
SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 48}, "resample": 2}
PLAIN = Preparation(32, 32, 32, 3, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # the pixels as they are


def preparation(directory: Path, config: dict[str, Any], name: str = PREPROCESSOR) -> Preparation:
    (directory / name).write_text(json.dumps(config))
    found = read_preparation(directory)
    assert found is not None
    return found


def prepared(data: bytes, by: Preparation = PLAIN) -> NDArray[np.float32]:
    return by.prepare(data, LIMITS)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [CLIP | {"size": 224, "crop_size": 224}, CLIP | {"size": 20}, SIGLIP])
def test_numbers_are_those_of_transformers(config: dict[str, Any], tmp_path: Path, subtests: pytest.Subtests) -> None:
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    ours = preparation(tmp_path, config)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert len(varied()) == 200
    for name, data in varied():
        with subtests.test(name):
            picture = load_image(Image.open(io.BytesIO(data)))
            # It takes an image one or three pixels high for one whose channels come first, unless it is told.
            expected = theirs(picture, input_data_format="channels_last", return_tensors="np")["pixel_values"][0]
            found = ours.prepare(data, LIMITS)
            assert found.dtype == np.float32
            assert np.array_equal(found, expected) or max(picture.size) > 16 * min(picture.size)
            assert np.vdot(found, expected) / np.linalg.norm(found) / np.linalg.norm(expected) > 0.999999


def test_an_image_is_scaled_and_normalized_as_its_checkpoint_states(tmp_path: Path) -> None:
    """The numbers are those that CLIP and SigLIP state: (value / 255 - mean) / deviation."""
    data = written(Image.new("RGB", (100, 70), (0, 128, 255)))
    clip = prepared(data, preparation(tmp_path, CLIP))
    assert clip.shape == (3, 32, 32)
    assert clip[:, 5, 5] == pytest.approx([-1.792263, 0.168897, 2.145897], abs=1e-6)

    siglip = prepared(data, preparation(tmp_path, SIGLIP | {"image_processor_type": "SiglipImageProcessorFast"}))
    assert siglip.shape == (3, 32, 48)
    assert siglip[:, 5, 5] == pytest.approx([-1.0, 0.003922, 1.0], abs=1e-6)

    bare = prepared(data, preparation(tmp_path, SIGLIP | {"do_rescale": False, "do_normalize": False}))
    assert bare[:, 5, 5].tolist() == [0, 128, 255]


def test_the_middle_is_kept_and_black_is_put_around_what_is_too_small() -> None:
    stripes = Image.new("RGB", (96, 32), "red")
    stripes.paste((0, 0, 255), (32, 0, 64, 32))
    assert prepared(written(stripes)).mean((1, 2)).tolist() == [0, 0, 255]

    small = Preparation(34, 34, 32, 3, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    around = prepared(written(Image.new("RGB", (32, 32), "white")), small)
    assert (around[:, 0].max(), around[:, :, 33].max(), around[:, 1:33, 1:33].min()) == (0, 0, 255)


@subcases(("format", "orientation"), [("JPEG", 6), ("PNG", 3), ("WEBP", 8), ("TIFF", 2)])
def test_an_image_is_turned_as_its_exif_data_state(format: str, orientation: int) -> None:
    corner = Image.new("RGB", (32, 32))
    corner.paste("white", (0, 0, 16, 16))
    bright = prepared(written(corner, format=format, orientation=orientation))[0]
    corners = {2: (8, 24), 3: (24, 24), 6: (8, 24), 8: (24, 8)}
    assert bright[corners[orientation]] > 200
    assert bright.mean() < 80


def test_broken_exif_data_turn_nothing() -> None:
    picture = drawn(32, 32)
    assert np.array_equal(prepared(written(picture, exif=b"Exif\0\0broken")), prepared(written(picture)))


def test_an_animation_counts_by_its_first_frame() -> None:
    first = drawn(32, 32).convert("P")
    animated = written(first, "P", "GIF", save_all=True)
    assert np.array_equal(prepared(animated), prepared(written(first, "P", "GIF")))


def test_an_image_of_one_line_takes_no_more_memory_than_others() -> None:
    """Resized as a whole, it would have 32 times its millions of pixels."""
    line = written(Image.new("L", (4_000_000, 1), 200), "L")
    tracemalloc.start()
    assert prepared(line).min() == 200
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_entries_of_exif_data_that_share_their_bytes_take_no_memory() -> None:
    """Each of 2,000 entries states that 40 KB of the same 60 KB are its value."""
    entries = b"".join(pack("<HHII", 1 + tag, 7, 40_000, 24_010) for tag in range(2_000))
    exif = b"Exif\0\0II*\0" + pack("<IH", 8, 2_000) + entries + bytes(40_500)
    data = b"\xff\xd8\xff\xe1" + pack(">H", len(exif) + 2) + exif + written(drawn(32, 32), format="JPEG")[2:]
    tracemalloc.start()
    assert prepared(data).shape == (3, 32, 32)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_a_frame_larger_than_its_header_states_is_refused() -> None:
    data = bytearray(written(drawn(200, 100), "P", "GIF"))
    data[6:10] = pack("<HH", 9, 9)
    with pytest.raises(InvalidRequest, match=r"200 × 100 pixels; at most 0.001 M \(max_image_pixels\)"):
        PLAIN.prepare(bytes(data), ImageLimits(max_image_pixels=1_000))


@subcases("format", [("RGB", "PNG"), ("RGB", "JPEG"), ("RGB", "WEBP"), ("P", "GIF"), ("P", "BMP"), ("RGB", "TIFF")])
def test_broken_files_are_refused_or_read_and_nothing_else(format: tuple[str, str]) -> None:
    sound = written(drawn(33, 31), *format, orientation=6)
    rng = np.random.default_rng(0)
    broken = [sound[: len(sound) * part // 40] for part in range(40)]
    for _ in range(120):
        flipped = np.frombuffer(sound, np.uint8).copy()
        where = rng.integers(0, rng.choice([60, len(sound)]), 3)
        flipped[where] ^= rng.integers(1, 256, 3, np.uint8)
        broken.append(flipped.tobytes())
    refused = 0
    for data in broken:
        try:
            assert prepared(data).shape == (3, 32, 32)
        except InvalidRequest as error:
            assert "0x" not in error.message
            refused += 1
    assert refused > 30


def test_a_directory_without_a_processor_has_no_preparation(tmp_path: Path) -> None:
    assert read_preparation(tmp_path) is None
    (tmp_path / PROCESSOR).write_text('{"processor_class": "CLIPProcessor"}')
    assert read_preparation(tmp_path) is None


def test_the_file_that_names_all_processors_comes_first(tmp_path: Path) -> None:
    preparation(tmp_path, CLIP)
    assert preparation(tmp_path, {"image_processor": SIGLIP}, PROCESSOR) == Preparation(
        32, 48, None, 2, 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    )


@subcases(
    ("config", "rule"),
    [
        ({}, "image_processor_type=None: must be one of CLIPImageProcessor, SiglipImageProcessor"),
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type='ViTImageProcessor': must be one of"),
        (CLIP | {"size": "large"}, r"Expected `int \| object`, got `str` - at `\$.size`"),
        (CLIP | {"size": 0}, r"Expected `int` >= 1 - at `\$.size`"),
        (CLIP | {"resample": 9}, r"Expected `int` <= 5 - at `\$.resample`"),
        (CLIP | {"image_std": [1, 0, 1]}, r"Expected `float` > 0.0"),
        (CLIP | {"do_center_crop": False}, "must give all images one height and one width"),
        (CLIP | {"do_resize": False}, "must give all images one height and one width"),
        (SIGLIP | {"do_center_crop": True}, "must give all images one height and one width"),
        (CLIP | {"size": {"longest_edge": 9}}, "must give all images one height and one width"),
        (CLIP | {"crop_size": {"height": 9}}, "must give all images one height and one width"),
    ],
)
def test_other_processors_are_refused(config: dict[str, Any], rule: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"{PREPROCESSOR}: .*{rule}"):
        preparation(tmp_path, {"processor_class": "X"} | config)
