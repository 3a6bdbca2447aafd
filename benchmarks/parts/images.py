"""Vectors of images: ours, infinity's, sentence-transformers' and transformers' behind FastAPI, from the same JPEGs on the same cores.

Each server is started anew in each round, alone on the machine. A peer that does not start is shown with the reason.
"""

import base64
import io
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from PIL import Image

from benchmarks.harness.result import FOLDER, Part, Result, Run, count, milliseconds, rotated, short, spread
from benchmarks.harness.rounds import Measurements, with_usage
from benchmarks.harness.servers import Server, ask, load, python_of, script
from benchmarks.harness.texts import CORES, INT8, WEIR, bounded, infinity, serving_texts, weir_texts
from weir.images import ImageLimits
from weir.images.preparation import read_preparation

Start = Callable[[], AbstractContextManager[Server]]

BY_SENTENCE_TRANSFORMERS, BY_TRANSFORMERS = "sentence-transformers, FastAPI", "transformers, FastAPI"
INFINITY = "infinity_emb, torch"  # its engine optimum computes no images
SERVERS = (WEIR, INT8, INFINITY, BY_SENTENCE_TRANSFORMERS, BY_TRANSFORMERS)
NOT_SET_UP = {
    "clip-as-service": "clip-server 0.8.3 loads only the released weights of its own table, which it compares by MD5"
}
CLIENTS = (1, 16, 64)
CHECKPOINT = "clip-vit-base-patch32-random"
WARM_UP_SECONDS = 2.0
DECODINGS = 3  # of each image, of which the quickest counts
SECONDS_A_CLIENT = 0.2  # of load at least: with 64 clients the slowest answers each of them only every ten seconds

# Sizes of pictures as they stand on pages, and bytes of their files.
SIZES = ((800, 600), (1024, 768), (768, 1024), (1280, 960), (1600, 1200), (1920, 1080))
KILOBYTES = range(100, 401, 25)


def checkpoint() -> Path:
    """Return the folder of the random CLIP that all serve, written at the first call."""
    place = FOLDER / CHECKPOINT
    if not (place / "tokenizer.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        ask([*bounded(), python_of("sentence-transformers"), "-P", script("clip_checkpoint.py"), str(place)])
    return place


def jpeg(number: int, size: tuple[int, int], most: int) -> bytes:
    """Return a JPEG of noise whose amplitude falls with its frequency, as that of photographs does, in the best quality that has at most `most` bytes."""
    chance = np.random.default_rng(number)
    width, height = size
    pixels = np.zeros((height, width, 3), np.float32)
    for octave in range(2, 11):
        grid = chance.normal(size=(2**octave * height // width + 1, 2**octave, 3)).astype(np.float32)
        layers = [Image.fromarray(grid[:, :, channel]).resize(size, Image.Resampling.BICUBIC) for channel in range(3)]
        pixels += np.stack([np.asarray(layer) for layer in layers], axis=-1) * np.float32(0.75) ** octave
    image = Image.fromarray((128 + 48 * pixels / pixels.std()).clip(0, 255).astype(np.uint8))
    qualities = range(1, 96)
    best = bisect_right(qualities, most, key=lambda quality: len(_encoded(image, quality)))
    return _encoded(image, qualities[max(best - 1, 0)])


def _encoded(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def jpegs() -> list[bytes]:
    """Return the images, always the same."""
    return [
        jpeg(each, SIZES[place * len(SIZES) // len(KILOBYTES)], 1000 * each) for place, each in enumerate(KILOBYTES)
    ]


def body(image: bytes) -> bytes:
    """Return a request for the vector of an image, as infinity's clients write it."""
    url = "data:image/jpeg;base64," + base64.b64encode(image).decode()
    return json.dumps({"input": [url], "model": "all-minilm-l6-v2", "modality": "image"}).encode()


def _starts(directory: Path, first: bytes) -> dict[str, Start]:
    path = "/embeddings"
    ours = [*weir_texts(directory, "--device-map", "cpu"), "--cache", str(FOLDER / "images-cache")]
    starts: dict[str, Start] = {
        name: partial(serving_texts, name, [*ours, *more], path, first)
        for name, more in ((WEIR, ()), (INT8, ("--precision", "int8")))
    }
    starts[INFINITY] = partial(infinity, "torch", directory, name=INFINITY, path=path, body=first)
    for by, name in (("sentence-transformers", BY_SENTENCE_TRANSFORMERS), ("transformers", BY_TRANSFORMERS)):
        starts[name] = partial(_by_hand, by, name, directory, first)
    return starts


def _by_hand(by: str, name: str, directory: Path, first: bytes) -> AbstractContextManager[Server]:
    told = ["--directory", str(directory), "--port", "{port}", "--threads", str(CORES), "--by", by]
    command = [*bounded(), python_of("sentence-transformers"), "-P", script("image_vectors.py"), *told]
    return serving_texts(name, command, "/embeddings", first)


def _one_start(name: str, start: Start, bodies: Path, run: Run, measured: Measurements) -> None:
    with start() as server:
        load(server.url, 2, WARM_UP_SECONDS, bodies=bodies)
        for clients in CLIENTS:
            seconds = max(run.seconds, SECONDS_A_CLIENT * clients)
            figures = with_usage(server, partial(load, server.url, clients, seconds, bodies=bodies))
            measured.add(name, clients, figures)
            run.step(f"{name}, {clients} clients: {figures['rate']:.1f} images/s")


def measure(run: Run) -> Result:
    """Start each server in each round, and put the loads of all numbers of clients on it."""
    images = jpegs()
    bodies = FOLDER / "images.jsonl"
    FOLDER.mkdir(exist_ok=True)
    bodies.write_bytes(b"".join(body(each) + b"\n" for each in images))
    measured, missing = Measurements(run), dict(NOT_SET_UP)
    starts = _starts(checkpoint(), body(images[0]))
    for turn in range(run.rounds):
        for name in rotated([name for name in SERVERS if name not in missing], turn):
            try:
                _one_start(name, starts[name], bodies, run, measured)
            except (RuntimeError, SystemExit) as error:
                missing[name] = str(error).strip().splitlines()[-1]
                run.step(f"{name}: {missing[name]}")
    return _result(measured, [name for name in SERVERS if name not in missing], missing, images)


def decoding(directory: Path, images: Sequence[bytes]) -> list[float]:
    """Return the processor seconds that a worker of ours takes to decode, resize and normalize each image, at best."""
    preparation, limits = read_preparation(directory), ImageLimits()
    assert preparation is not None  # the checkpoint states it
    found = []
    for image in images:
        times = []
        for _ in range(DECODINGS):
            began = time.thread_time()
            preparation.prepare(image, limits)
            times.append(time.thread_time() - began)
        found.append(min(times))
    return found


def _result(measured: Measurements, names: Sequence[str], missing: dict[str, str], images: Sequence[bytes]) -> Result:
    result = Result(["clients", "server", "images/s", "p50 ms", "CPU ms an image", "MiB, PSS"])
    for clients in CLIENTS:
        for name in names:
            rates = spread(measured.of(name, clients), "{:.1f}".format)
            cpu, memory = (measured.middle(name, clients, figure) for figure in ("all", "memory"))
            p50 = short(measured.middle(name, clients, "p50") * 1e3)
            result.rows.append([str(clients), name, rates, p50, milliseconds(cpu), count(memory / 2**20)])
    result.values |= measured.values()
    peers = [name for name in names if name not in (WEIR, INT8)]
    for clients, least in zip(CLIENTS, (1, 2, 2), strict=True) if peers and WEIR in names else ():
        best = max(peers, key=lambda name: measured.middle(name, clients))
        result.values[f"times best {clients}"] = times = measured.times(WEIR, best, clients)
        result.at_least(f"{clients} clients: at least {least} times {best}, the best peer", times, least)
    sizes, decoded = sorted(map(len, images)), decoding(checkpoint(), images)
    result.notes.append(
        f"{len(images)} JPEGs of {sizes[0] // 1000} to {sizes[-1] // 1000} KB, 0.5 to 2 megapixels, one a request as base64 in JSON; a random CLIP of ViT-B/32's sizes. "
        f"Each server has {CORES} cores and starts anew in each round. To decode and resize an image takes Weir {milliseconds(min(decoded))} to {milliseconds(max(decoded))} ms of a core, "
        f"{milliseconds(fmean(decoded))} on average; the rest is mostly the network."
    )
    result.notes += [f"{name}: *not measured: {reason}*" for name, reason in missing.items()]
    return result


PART = Part(
    "images",
    "Vectors of images",
    "CLIP (ViT-B/32) on all cores over HTTP. In fp32 all servers multiply the same matrices about as fast as the cores can; int8 halves that.",
    lambda rounds: rounds * len(CLIENTS) * len(SERVERS),
    measure,
)
