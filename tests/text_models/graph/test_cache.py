"""Graphs are made once, whole, and again where what is kept is broken."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.text_models import tiny
from tests.text_models.graph.running import Running

import weir.embedding
from weir.errors import SettingsError
from weir.text_models import Pooling, Precision, Recipe
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.graph.building import WEIGHTS
from weir.text_models.graph.cache import MANIFEST, cache_directory, graph_file, hold, locked, prune

MEAN = Recipe(Pooling.MEAN)
TEXT = [np.array([0, 5, 6, 2])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    # Large enough that its tables lie outside the graph.
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("models") / "bert", tokenizer=False, vocab_size=90))


def test_it_is_made_once_and_again_where_it_is_broken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = graph_file(checkpoint, MEAN, tmp_path)
    vectors = Running(path)(TEXT)
    first, weights = path.stat().st_mtime_ns, path.parent / WEIGHTS
    assert graph_file(checkpoint, MEAN, tmp_path) == path
    assert path.stat().st_mtime_ns == first
    for damage in (
        lambda: path.write_bytes(path.read_bytes()[:-1000]),
        lambda: weights.write_bytes(weights.read_bytes()[:-1000]),
        weights.unlink,
    ):
        damage()
        assert graph_file(checkpoint, MEAN, tmp_path) == path
        assert np.array_equal(Running(path)(TEXT), vectors)
    # No half-made folders are left.
    assert sorted(one.suffix for one in (tmp_path / "graphs").iterdir()) == ["", ".lock"]


def test_what_decides_the_vectors_decides_the_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    recipes = [MEAN, Recipe(Pooling.CLS), Recipe(Pooling.MEAN, layers=(-2,)), replace(MEAN, precision=Precision.FP16)]
    assert len({graph_file(checkpoint, recipe, tmp_path) for recipe in recipes}) == len(recipes)
    other = read_checkpoint(tiny.model(tmp_path / "other", tokenizer=False, vocab_size=90, seed=1))
    same = read_checkpoint(tiny.model(tmp_path / "same", tokenizer=False, vocab_size=90))
    expected = graph_file(checkpoint, MEAN, tmp_path)
    assert graph_file(other, MEAN, tmp_path) != expected == graph_file(same, MEAN, tmp_path)


def test_several_processes_at_once_share_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from weir.text_models.checkpoint.reading import read_checkpoint\n"
        "from weir.text_models.graph.cache import graph_file; from weir.text_models.recipe import Pooling, Recipe\n"
        "print(graph_file(read_checkpoint(Path(sys.argv[1])), Recipe(Pooling.MEAN), Path(sys.argv[2])))\n"
        "assert 'onnx' not in sys.modules\n"
    )
    told = [sys.executable, "-c", program, str(checkpoint.directory), str(tmp_path)]
    children = [subprocess.Popen(told, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {child.communicate()[0] for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    (path,) = said
    assert Running(Path(path.strip()))(TEXT).shape == (1, 32)


def test_why_a_graph_cannot_be_made_is_reported(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"cache .*file/graphs: a graph cannot be written there"):
        graph_file(checkpoint, MEAN, tmp_path / "file")
    activation = read_checkpoint(tiny.model(tmp_path / "other", tokenizer=False, hidden_act="mish"))
    with pytest.raises(SettingsError, match=r"^\S*/other: activation 'mish': must be one of gelu"):
        graph_file(activation, MEAN, tmp_path)


def test_the_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() == Path(os.path.expanduser("~/.cache/weir"))
    for name, expected in (("XDG_CACHE_HOME", "/some/weir"), ("WEIR_CACHE", "/some")):
        monkeypatch.setenv(name, "/some")
        assert cache_directory() == Path(expected)


SIZE = 100


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    """Three graphs of SIZE bytes each: `a` was used first, `c` last."""
    for used, name in enumerate("abc", start=1):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "weights").write_bytes(b"x" * (SIZE - 2))
        (folder / MANIFEST).write_text("{}")
        os.utime(folder / MANIFEST, (used, used))
        (tmp_path / f"{name}.lock").touch()
    return tmp_path


def left(graphs: Path) -> list[str]:
    return sorted(each.name for each in graphs.iterdir())


def test_what_was_used_least_recently_goes_with_its_lock(graphs: Path) -> None:
    assert prune(graphs, 3 * SIZE) == []
    assert prune(graphs, 2 * SIZE + 1) == [graphs / "a"]
    assert left(graphs) == ["b", "b.lock", "c", "c.lock"]
    with closing(hold(graphs / "b") or pytest.fail("gone")):
        pass  # its use is over, but it was used last
    assert prune(graphs, SIZE) == [graphs / "c"]
    assert prune(graphs, 0) == [graphs / "b"]
    assert left(graphs) == [] and prune(graphs, 0) == [] and prune(graphs / "nowhere", 0) == []


def test_what_is_in_use_stays_whoever_uses_it(graphs: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from weir.text_models.graph.cache import hold\n"
        "held = hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(graphs / "a")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with closing(hold(graphs / "b") or pytest.fail("gone")):
            assert prune(graphs, 0) == [graphs / "c"]
        assert prune(graphs, 0) == [graphs / "b"]
        other.kill()  # who dies uses nothing
        other.wait()
    assert prune(graphs, 0) == [graphs / "a"]


def test_what_is_forgotten_is_held_no_longer(graphs: Path) -> None:
    held = hold(graphs / "a")
    assert held is not None and prune(graphs, 2 * SIZE) == [graphs / "b"]
    del held
    assert prune(graphs, SIZE) == [graphs / "c"] and prune(graphs, 0) == [graphs / "a"]
    assert hold(graphs / "a") is None


def test_what_is_being_made_stays_and_what_is_broken_goes_first(graphs: Path) -> None:
    (graphs / "c" / MANIFEST).unlink()
    assert prune(graphs, 2 * SIZE) == [graphs / "c"]
    with locked(graphs / "a") as ours, locked(graphs / "a", wait=False) as theirs:
        assert ours and not theirs
        assert prune(graphs, 0) == [graphs / "b"]


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(graphs: Path) -> None:
    def lock_and_look() -> bool:
        with locked(graphs / "a"), locked(graphs / "a", wait=False) as again:
            return not again  # the lock that is there is ours

    with ThreadPoolExecutor(1) as pool:
        with locked(graphs / "a"):
            waiting = pool.submit(lock_and_look)
            (graphs / "a.lock").unlink()
        assert waiting.result(60)
    assert (graphs / "a.lock").exists()


def test_several_may_prune_at_once(graphs: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        gone = [each for found in pool.map(lambda _: prune(graphs, SIZE), range(4)) for each in found]
    assert len(gone) == len(set(gone))
    assert left(graphs) == ["c", "c.lock"]


def test_a_server_keeps_its_own_and_those_of_others_that_run(tmp_path: Path) -> None:
    model, graphs = tiny.model(tmp_path / "model"), tmp_path / "cache" / "graphs"
    settings: dict[str, Any] = {
        "port": 0, "threads": 1, "device_map": ["cpu"], "calibrate": False, "cache": str(tmp_path / "cache"), "max_cache_size": 0,
    }  # fmt: skip

    def of_graphs() -> set[Path]:
        return {each for each in graphs.iterdir() if each.is_dir()}

    with weir.embedding.serve(model, pooling="cls", **settings):
        old = of_graphs()
    with weir.embedding.serve(model, workers=2, **settings) as first:  # forks of one that has opened it
        (own,) = of_graphs()
        assert own not in old
        with weir.embedding.serve(model, pooling="max", **settings):
            assert own in of_graphs() and len(of_graphs()) == 2
        assert httpx.post(f"{first.url}/encode", json={"texts": ["it"]}).status_code == 200
    with weir.embedding.serve(model, pooling="max", **settings | {"max_cache_size": 1 << 30}):
        assert len(of_graphs()) == 2 and own in of_graphs()
