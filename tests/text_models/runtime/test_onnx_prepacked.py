"""Weights lie in a file as the CPU computes with them: made once for each CPU, and again where it is broken; without it there are the threads of a worker."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny

from weir.text_models import ComputingSettings, Pooling, Recipe, WorkerShare
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.graph.cache import graph_file, prune
from weir.text_models.runtime import Inputs, onnx
from weir.text_models.runtime.onnx import OnnxRuntime, cpu_key, open_onnx
from weir.text_models.runtime.onnx import prepacked as copy_of

MEAN = Recipe(Pooling.MEAN)
CPUINFO = (
    "processor\t: 0\nmodel name\t: One\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\nprocessor\t: 1\nmodel name\t: Other\n"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("models") / "bert", tokenizer=False, vocab_size=90))


def vectors(runtime: OnnxRuntime) -> Any:
    ids = np.array([[0, 5, 6, 2]], np.int32)
    ones = np.ones_like(ids)
    return runtime.run(Inputs(ids, ones, 0 * ones, ones.astype(np.float32)))[0]


def opened(checkpoint: Checkpoint, cache: Path, *, packed: bool = True) -> OnnxRuntime:
    return open_onnx(checkpoint, MEAN, ComputingSettings(cache=str(cache)), WorkerShare(1, 2 if packed else 1), "cpu")


def test_sessions_of_any_number_of_threads_compute_the_same(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plain, packed = opened(checkpoint, tmp_path, packed=False), opened(checkpoint, tmp_path)
    assert plain.widened(3) is None
    wide = packed.widened(3)
    assert wide is not None
    assert np.array_equal(vectors(plain), vectors(packed))
    assert np.array_equal(vectors(plain), vectors(wide))


def test_a_copy_is_made_once_and_again_where_it_is_broken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    graph = graph_file(checkpoint, MEAN, tmp_path)
    copy = copy_of(graph)
    assert copy is not None
    expected = vectors(OnnxRuntime(graph))
    first = copy.stat().st_mtime_ns
    assert copy_of(graph) == copy
    assert copy.stat().st_mtime_ns == first
    for broken in (copy, copy.with_suffix(".bin"), copy.with_suffix(".json")):
        broken.write_bytes(broken.read_bytes()[:-10])
        assert copy_of(graph) == copy
        assert np.array_equal(vectors(OnnxRuntime(graph, packed=copy)), expected)
    assert graph_file(checkpoint, MEAN, tmp_path) == graph
    assert {each.name for each in graph.parent.iterdir() if each.stem == copy.stem} == {
        copy.name, copy.with_suffix(".bin").name, copy.with_suffix(".json").name,
    }  # fmt: skip
    assert not (graph.parent / "packing").exists()
    assert prune(tmp_path / "graphs", 0) == [graph.parent]


def test_each_kind_of_cpu_has_a_copy_of_its_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def described(flags: str, mhz: int) -> Path:
        file = tmp_path / f"{flags}-{mhz}"
        file.write_text(CPUINFO.format(flags=flags, mhz=mhz))
        return file

    keys = [cpu_key(described(*each)) for each in (("avx2", 2000), ("avx2", 3000), ("avx2 avx512f", 3000))]
    assert keys[0] == keys[1] != keys[2]
    assert cpu_key(tmp_path / "none") is None
    graph = graph_file(checkpoint, MEAN, tmp_path)
    copies = {copy_of(graph, described("avx2", 2000)), copy_of(graph, described("avx512f", 2000))}
    assert None not in copies and len(copies) == 2
    assert copy_of(graph, tmp_path / "none") is None


def test_without_a_copy_there_are_the_threads_of_a_worker(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(module: str, *arguments: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(onnx, "run_child", full)
    runtime = opened(checkpoint, tmp_path)
    assert runtime.widened(2) is None
    assert np.array_equal(vectors(runtime), vectors(opened(checkpoint, tmp_path, packed=False)))
    assert not (graph_file(checkpoint, MEAN, tmp_path).parent / "packing").exists()
