"""Graphs on disk stay within a bound: who was used least recently goes, who is in use stays."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.embedding import tiny

import weir.embedding
from weir.embedding.graph.cache import SEAL, hold, locked, prune

SIZE = 100


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    """Three graphs of SIZE bytes each: `a` was used first, `c` last."""
    for used, name in enumerate("abc", start=1):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "weights").write_bytes(b"x" * (SIZE - 2))
        (folder / SEAL).write_text("{}")
        os.utime(folder / SEAL, (used, used))
        (tmp_path / f"{name}.lock").touch()
    return tmp_path


def left(graphs: Path) -> list[str]:
    return sorted(each.name for each in graphs.iterdir())


def test_what_was_used_least_recently_goes_with_its_lock(graphs: Path) -> None:
    assert prune(graphs, 3 * SIZE) == []
    assert prune(graphs, 2 * SIZE + 1) == [graphs / "a"]
    assert left(graphs) == ["b", "b.lock", "c", "c.lock"]
    with hold(graphs / "b") or pytest.fail("gone"):
        pass  # its use is over, but it was used last
    assert prune(graphs, SIZE) == [graphs / "c"]
    assert prune(graphs, 0) == [graphs / "b"]
    assert left(graphs) == [] and prune(graphs, 0) == [] and prune(graphs / "nowhere", 0) == []


def test_what_is_in_use_stays_whoever_uses_it(graphs: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from weir.embedding.graph.cache import hold\n"
        "held = hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(graphs / "a")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with hold(graphs / "b") or pytest.fail("gone"):
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


def test_what_is_being_made_stays(graphs: Path) -> None:
    with locked(graphs / "a") as ours, locked(graphs / "a", wait=False) as theirs:
        assert ours and not theirs
        assert prune(graphs, 0) == [graphs / "b", graphs / "c"]


def test_what_is_broken_goes_first(graphs: Path) -> None:
    (graphs / "c" / SEAL).unlink()
    assert prune(graphs, 2 * SIZE) == [graphs / "c"]


def test_what_is_gone_cannot_be_held(graphs: Path) -> None:
    assert hold(graphs / "d") is None


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(graphs: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with locked(graphs / "a"):
            waiting = pool.submit(_lock_and_look, graphs / "a")
            (graphs / "a.lock").unlink()
        assert waiting.result(20)
    assert (graphs / "a.lock").exists()


def _lock_and_look(folder: Path) -> bool:
    with locked(folder), locked(folder, wait=False) as again:
        return not again  # the lock that is there is ours


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
