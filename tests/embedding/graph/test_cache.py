"""Graphs are made once, whole, and again where what is kept is broken."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.embedding import tiny
from tests.embedding.graph.running import Running

from weir.embedding.checkpoint.reading import Checkpoint, read_checkpoint
from weir.embedding.graph.building import WEIGHTS
from weir.embedding.graph.cache import cache_directory, graph_file
from weir.embedding.recipe import Pooling, Precision, Recipe
from weir.errors import SettingsError

MEAN = Recipe(Pooling.MEAN)
TEXT = [np.array([0, 5, 6, 2])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    # Large enough that its tables lie outside the graph.
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("models") / "bert", tokenizer=False, vocab_size=90))


def test_it_is_made_once_and_again_where_it_is_broken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = graph_file(checkpoint, MEAN, tmp_path)
    vectors = Running(path)(TEXT)
    first = path.stat().st_mtime_ns
    assert graph_file(checkpoint, MEAN, tmp_path) == path
    assert path.stat().st_mtime_ns == first
    weights = path.parent / WEIGHTS
    for broken in (path, weights):
        broken.write_bytes(broken.read_bytes()[:-1000])
        again = graph_file(checkpoint, MEAN, tmp_path)
        assert again == path
        assert np.array_equal(Running(path)(TEXT), vectors)
    weights.unlink()
    assert np.array_equal(Running(graph_file(checkpoint, MEAN, tmp_path))(TEXT), vectors)
    # No half-made folders are left.
    assert sorted(one.suffix for one in (tmp_path / "graphs").iterdir()) == ["", ".lock"]


def test_weights_begin_at_pages(checkpoint: Checkpoint, tmp_path: Path) -> None:
    import onnx

    graph = onnx.load(str(graph_file(checkpoint, MEAN, tmp_path)), load_external_data=False).graph
    offsets = [int(entry.value) for one in graph.initializer for entry in one.external_data if entry.key == "offset"]
    assert len(offsets) > 10
    assert all(offset % 4096 == 0 for offset in offsets)


def test_what_decides_the_vectors_decides_the_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    recipes = [MEAN, Recipe(Pooling.CLS), Recipe(Pooling.MEAN, layers=(-2,)), replace(MEAN, precision=Precision.FP16)]
    assert len({graph_file(checkpoint, recipe, tmp_path) for recipe in recipes}) == len(recipes)
    other = read_checkpoint(tiny.model(tmp_path / "other", tokenizer=False, vocab_size=90, seed=1))
    same = read_checkpoint(tiny.model(tmp_path / "same", tokenizer=False, vocab_size=90))
    assert (
        graph_file(other, MEAN, tmp_path) != graph_file(checkpoint, MEAN, tmp_path) == graph_file(same, MEAN, tmp_path)
    )


def test_several_processes_at_once_share_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from weir.embedding.checkpoint.reading import read_checkpoint\n"
        "from weir.embedding.graph.cache import graph_file; from weir.embedding.recipe import Pooling, Recipe\n"
        "print(graph_file(read_checkpoint(Path(sys.argv[1])), Recipe(Pooling.MEAN), Path(sys.argv[2])))\n"
        "assert 'onnx' not in sys.modules\n"
    )
    told = [sys.executable, "-c", program, str(checkpoint.directory), str(tmp_path)]
    children = [subprocess.Popen(told, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {child.communicate()[0] for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    (path,) = said
    assert Running(Path(path.strip()))(TEXT).shape == (1, 32)


def test_a_directory_that_cannot_be_written_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"cache .*file/graphs: a graph cannot be written there"):
        graph_file(checkpoint, MEAN, tmp_path / "file")


def test_why_a_graph_cannot_be_made_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    activation = read_checkpoint(tiny.model(tmp_path / "other", tokenizer=False, hidden_act="mish"))
    with pytest.raises(SettingsError, match=r"its graph cannot be made: .*activation 'mish': must be one of gelu"):
        graph_file(activation, MEAN, tmp_path)


def test_the_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() == Path(os.path.expanduser("~/.cache/weir"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/weir")
    monkeypatch.setenv("WEIR_CACHE", "/elsewhere")
    assert cache_directory() == Path("/elsewhere")
