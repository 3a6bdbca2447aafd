"""An image depends on nothing but its files, is what engines of containers load, and runs as any user on a root that nobody can write.

What is built from packages is run by `make test-image` in a namespace that bubblewrap makes: the layers of the archive are its root, which is
read-only, the server is its process 1, and its variables are those of the image alone.
"""

import gzip
import hashlib
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from signal import SIGTERM
from typing import Any, NamedTuple

import grpc
import httpx
import psutil
import pytest
from deploy.image import USER, VARIANTS, config_of, copy_models, pack, write_image
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.deploy.kit import image_of_docker
from tests.documentation.pages import ROOT

from weir.bench.vectors import reserve_ports
from weir.text_server.server_settings import installed_model

EPOCH = 1_700_000_000
FILES = {"opt/weir/bin/weir": 0o700, "opt/weir/lib.py": 0o600, "etc/passwd": 0o640, "home/weir/.cache/file": 0o600}


def folder(path: Path, names: Sequence[str], umask: int, content: str = "x = 1\n") -> Path:
    """Return `path` with files of these names."""
    before = os.umask(umask)
    for name in names:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        file.chmod(FILES[name])
    (path / "tmp").mkdir(parents=True)
    (path / "bin").symlink_to("opt/weir/bin")
    os.umask(before)
    return path


class Image(NamedTuple):
    """An archive as those who load it read it."""

    path: Path
    manifest: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Image":
        """Read what the archive at `path` has, following its digests."""
        (described,) = json.load(file_of(path, "index.json"))["manifests"]
        manifest = json.load(blob(path, described))
        return cls(path, manifest, json.load(blob(path, manifest["config"])))

    def unpack(self, root: Path) -> None:
        """Unpack the layers into `root`."""
        for layer in self.manifest["layers"]:
            with tarfile.open(fileobj=blob(self.path, layer), mode="r:gz") as files:
                files.extractall(root, filter="tar")


def file_of(path: Path, name: str) -> BytesIO:
    with tarfile.open(path) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return BytesIO(file.read())


def blob(path: Path, described: dict[str, Any]) -> BytesIO:
    """Return the file that `described` names, after it was compared with its digest and size."""
    name = f"blobs/{described['digest'].replace(':', '/')}"
    content = file_of(path, name)
    assert f"sha256:{hashlib.sha256(content.getvalue()).hexdigest()}" == described["digest"]
    assert len(content.getvalue()) == described["size"]
    return content


def test_a_layer_depends_on_nothing_but_its_files(tmp_path: Path) -> None:
    one = pack(folder(tmp_path / "a", list(FILES), 0o077), tmp_path, EPOCH)
    assert pack(folder(tmp_path / "b", list(reversed(FILES)), 0o022), tmp_path, EPOCH) == one
    assert pack(folder(tmp_path / "c", list(FILES), 0o077, "x = 2\n"), tmp_path, EPOCH) != one


def test_no_hidden_file_of_the_models_gets_into_an_image(tmp_path: Path) -> None:
    for name in ("a/model.py", ".env", "a/.git/config", "__pycache__/a.pyc"):
        file = tmp_path / "models" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    copy_models(tmp_path / "models", tmp_path / "layer")
    copied = [path for path in (tmp_path / "layer").rglob("*") if path.is_file()]
    assert copied == [tmp_path / "layer/srv/models/a/model.py"]


def test_an_image_is_what_engines_load_and_any_user_may_run(tmp_path: Path) -> None:
    layout, path = tmp_path / "layout", tmp_path / "image.tar"
    layout.mkdir()
    layers = [
        pack(folder(tmp_path / name, names, 0o077), layout, EPOCH) for name, names in (("a", list(FILES)), ("b", ()))
    ]
    config = config_of(VARIANTS["core"], layers, "amd64", "1.2.3", EPOCH)
    digest = write_image(path, layout, "core", config, layers)

    image = Image.read(path)
    (described,) = json.load(file_of(path, "index.json"))["manifests"]
    assert described["digest"] == digest
    assert described["annotations"]["org.opencontainers.image.ref.name"] == "weir:core"
    assert image.config["created"] == "2023-11-14T22:13:20Z" and image.config["config"]["User"] == f"{USER}:0"
    for layer, unpacked in zip(image.manifest["layers"], image.config["rootfs"]["diff_ids"], strict=True):
        content = gzip.decompress(blob(path, layer).read())
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == unpacked
    with tarfile.open(fileobj=blob(path, image.manifest["layers"][0]), mode="r:gz") as files:
        found = {each.name: (oct(each.mode), each.uid, each.gid, each.mtime) for each in files}
    assert found["opt/weir/bin/weir"] == ("0o755", 0, 0, EPOCH) and found["opt/weir/lib.py"] == ("0o644", 0, 0, EPOCH)
    assert found["home/weir/.cache"] == ("0o775", USER, 0, EPOCH) and found["tmp"] == ("0o1777", 0, 0, EPOCH)


def test_it_runs_what_the_image_of_docker_runs() -> None:
    entry, variables = image_of_docker()
    config = config_of(VARIANTS["core"], [], "amd64", "1", EPOCH)["config"]
    assert config["Entrypoint"] == entry
    ours = dict(each.split("=", 1) for each in config["Env"])
    assert {name: ours.get(name) for name in variables} == variables
    assert ours.keys() - variables.keys() == {"PATH", "SSL_CERT_FILE"}


@cache
def built(variant: str) -> Image:
    return Image.read(ROOT / "build" / f"weir-{variant}.tar")


@pytest.fixture(scope="module", params=["core", "embed"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root") / str(request.param)
    path.mkdir()
    built(path.name).unpack(path)
    return path


class Served(NamedTuple):
    """A container whose server is ready: the process of bwrap, that of the server, its log so far, and its URL."""

    bwrap: "subprocess.Popen[str]"
    server: psutil.Process
    log: list[dict[str, Any]]
    url: str

    @property
    def seconds(self) -> float:
        """The processors' time that the server and its workers have taken: they are ready as soon as that on idle processors."""
        return sum(sum(each.cpu_times()[:2]) for each in (self.server, *self.server.children(recursive=True)))


@contextmanager
def container(root: Path, user: int, *words: str, **more: str) -> Iterator[Served]:
    """Run what the image runs with `words`, and the models of this variant where it looks for them, until the block ends."""
    config = built(root.name).config["config"]
    variables = dict(each.split("=", 1) for each in config["Env"]) | more
    command = [
        "bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent", "--clearenv", "--uid", str(user), "--gid", "0",
        "--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/home/weir/.cache",
        "--ro-bind", str(MODELS[root.name]), config["WorkingDir"], "--chdir", config["WorkingDir"],
        *(word for name, value in variables.items() for word in ("--setenv", name, value)), *config["Entrypoint"], *words,
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as bwrap:
        try:
            assert bwrap.stderr is not None
            log = []
            for line in bwrap.stderr:
                log.append(json.loads(line))
                if log[-1]["event"] == "ready":
                    break
            (server,) = psutil.Process(bwrap.pid).children()
            yield Served(bwrap, server, log, f"http://127.0.0.1:{variables['WEIR_PORT']}")
        finally:
            bwrap.kill()


MODELS = {"core": ROOT / "deploy" / "models", "embed": installed_model()}


@pytest.mark.image
@pytest.mark.parametrize("user", [USER, 1_000_650_000])  # that of the image, and one that OpenShift makes up
def test_any_user_runs_it_on_a_root_that_nobody_can_write(root: Path, user: int) -> None:
    with reserve_ports(4) as reserved:
        names = ("WEIR_PORT", "WEIR_GRPC_PORT", "WEIR_ZMQ_PORT", "WEIR_ZMQ_PORT_OUT")
        ports = dict(zip(names, map(str, reserved), strict=True))
        words = ["square:Square"] if root.name == "core" else ["square=."]
        with container(root, user, *words, **ports) as served:
            if root.name == "core":
                assert served.seconds < 2
                assert httpx.post(f"{served.url}/infer/square", json=3).json() == 9
            else:
                given = {"model": "square", "input": ["First do it"]}
                (vector,) = httpx.post(f"{served.url}/v1/embeddings", json=given, timeout=60).json()["data"]
                assert len(vector["embedding"]) == 384
            with grpc.insecure_channel(f"127.0.0.1:{ports['WEIR_GRPC_PORT']}") as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                assert (
                    check(health_pb2.HealthCheckRequest(), timeout=30).status == health_pb2.HealthCheckResponse.SERVING
                )
            served.server.send_signal(SIGTERM)
            assert served.bwrap.wait(45) == 0


@pytest.mark.image
def test_compiled_modules_name_no_time_and_no_place_of_a_build(root: Path) -> None:
    compiled = [path.read_bytes() for path in root.rglob("*.pyc")]
    assert len(compiled) > 1000
    assert {each[4:8] for each in compiled} == {b"\1\0\0\0"}  # that of a hash which is not compared
    assert not [each for each in compiled if b"weir-image-" in each]


@pytest.mark.image
def test_images_are_small_and_their_bills_name_all_packages(root: Path) -> None:
    limit = {"core": 250e6, "embed": 400e6}[root.name]
    assert sum(path.lstat().st_size for path in root.rglob("*")) < limit
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bill = (ROOT / "build" / f"weir-{root.name}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill) is None
    named = {each["purl"].partition("@")[0] for each in json.loads(bill)["components"]}
    assert {
        "pkg:deb/debian/libssl3t64",
        "pkg:deb/debian/python3.13",
        "pkg:pypi/grpcio",
        "pkg:pypi/numpy",
        "pkg:pypi/opentelemetry-sdk",
        "pkg:pypi/weir-serving",
    } <= named
    assert ("pkg:pypi/onnxruntime" in named) is (root.name == "embed")
