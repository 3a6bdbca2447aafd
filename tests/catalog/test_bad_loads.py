"""What callers of the control endpoints may say that cannot be: each is refused by name, and what runs goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.repository.shelf import plain, write
from tests.rings import subcases

from weir import InvalidRequest, ModelNotFound
from weir.catalog.loading import ServiceMaker
from weir.catalog.manager import Manager, without_paths
from weir.catalog.registry import Registry
from weir.catalog.repository.folder import upload_path, versions_in
from weir.catalog.repository.model_files import file_within
from weir.serving import NAME


def manager_of(root: Path, files: dict[str, str | bytes]) -> Manager:
    """Return a manager of these models under `root`."""
    registry = Registry([])
    registry.reserve(["v2", "metrics"])
    return Manager(registry, write(root, files), ServiceMaker(()), allow_files=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"route": "/v2/mine"}, "route='/v2/mine': /v2 is reserved"),
        ({"route": "/metrics"}, "route='/metrics'"),
        ({"route": ["/a", "/a/batch"]}, "route='/a/batch': is where the route '/a' takes lists"),
        ({"max_batch_size": 10**30}, "max_batch_size=1000000000"),
        ({"max_batch_size": 1 << 31}, "max_batch_size=2147483648: must be 1 or more, and at most 2147483647"),
        ({"max_queue_size": 10**30}, "max_queue_size=1000000000"),
        ({"workers": 10**30}, "workers=1000000000"),
        ({"arena_bytes": 1 << 63}, "arena_bytes=9223372036854775808: must be a number of at most 64 bits"),
    ],
)
async def test_a_load_that_cannot_be_is_refused_and_the_old_one_goes_on(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    manager = manager_of(tmp_path, {"one/1/model.py": plain("a"), "one/config.toml": 'executor = "inline"'})
    await manager.load_model("one")
    with pytest.raises(InvalidRequest) as refused:
        await manager.load_model("one", config=json.loads(json.dumps(config)))
    assert message in refused.value.message
    assert await manager.registry.get("one").infer(0) == "a"
    assert len(manager.registry.all) == 1
    await manager.stop(0.0)


def test_a_name_is_no_longer_than_a_files_may_be(tmp_path: Path) -> None:
    folder = write(tmp_path, {"one/1/model.py": plain()})
    for name in ("x" * 256, "x" * 100_000):
        with pytest.raises(ModelNotFound):
            folder.read(name)
        with pytest.raises(InvalidRequest, match=r"must be VERSION/NAME.*up to 255 for each part and 1024 for all"):
            folder.read("one", {}, {f"1/{name}": b""})
        with pytest.raises(InvalidRequest):
            upload_path("/".join(["1", *["x" * 200] * 6]))
    for file in ("y" * 300, "z" * 5000):
        with pytest.raises(Exception, match=r"one: file='[yz]+.*must be a file in|there is no such file"):
            file_within(tmp_path / "one" / "1", file, "one")
    assert NAME.fullmatch("x" * 255) and not NAME.fullmatch("x" * 256)


def test_versions_are_numbers_from_one_on(tmp_path: Path) -> None:
    for name in ("1", "2", "10", "01", "0", "00", "007", "a1", "1.5", "9" * 19):
        (tmp_path / name).mkdir()
    assert versions_in(tmp_path) == ["1", "2", "10"]


async def test_the_index_shows_no_absolute_paths(tmp_path: Path) -> None:
    broken = "raise ValueError('cannot open ' + __file__)"
    manager = manager_of(tmp_path, {"one/1/model.py": broken, "two/1/model.onnx": b"no graph"})
    for name in ("one", "two"):
        with pytest.raises(InvalidRequest):
            await manager.load_model(name)
    reasons = [state.reason for state in await manager.index()]
    assert "cannot open model.py" in reasons[0] and "cannot be read" in reasons[1]
    assert not any(str(tmp_path) in reason for reason in reasons)


@subcases(
    ("text", "shown"),
    [
        ("File '/srv/models/one/1/model.py', line 3", "File 'model.py', line 3"),
        ('see "/usr/lib/x.so": cannot', 'see "x.so": cannot'),
        ("http://host/a/b and one/1: 1/model.onnx", "http://host/a/b and one/1: 1/model.onnx"),
        ("from /tmp/a/b.onnx failed", "from b.onnx failed"),
    ],
)
def test_paths_are_cut_down_to_names(text: str, shown: str) -> None:
    assert without_paths(text) == shown
