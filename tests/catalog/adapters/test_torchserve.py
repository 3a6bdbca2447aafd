"""Model archives of TorchServe are served as they are; those with handlers of torch are for `make test-torch` and `make test-vision`."""

import gzip
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.catalog.adapters.archives import archive, manifest
from tests.rings import subcases

import weir
from weir.catalog.adapters import torchserve
from weir.catalog.adapters.torchserve import read_manifest, settings_from, unpack
from weir.catalog.loading import make_service
from weir.catalog.sources import ModelToServe, located
from weir.errors import SettingsError

# As a handler that is a function: it shows what it got, and does what the field `what` asks for.
SHOW = """
import os
from ts.utils.util import PredictionException

def handle(data, context):
    if data is None:
        return None
    results = []
    for index, row in enumerate(data):
        what = bytes(row.get("what", b"")).decode()
        if what == "raise":
            raise ValueError("broken")
        if what == "refuse":
            raise PredictionException("not so", 513)
        if what == "too few":
            return []
        if what == "no list":
            return "abc"
        if what == "exit":
            os._exit(3)
        if what == "status":
            context.set_response_status(code=418, phrase="teapot", idx=index)
            context.set_response_header(index, "X-Yours", "v")
            context.set_response_content_type(index, "text/x-mine")
        if what == "nothing":
            context.set_response_status(204, "", index)
        if what == "word":
            context.set_response_status("200", "", index)
        if what == "header":
            context.set_response_header(index, "X-Yours", "a\\r\\nb: c")
        context.metrics.add_counter("Seen", 1, index)
        context.metrics.add_time("Took", 2.5, index, "ms")
        shown = {name: [type(value).__name__, bytes(value).decode("latin-1") if isinstance(value, (bytes, bytearray)) else value] for name, value in row.items()}
        results.append({
            "bytes": b"\\x00\\xff", "text": "text", "none": None, "number": 3, "status": "short",
            "context": {
                **context.system_properties, "here": os.getcwd(), "manifest": context.manifest["model"]["modelName"],
                "yaml": context.model_yaml_config, "id": context.get_request_id(index), "mine": context.get_request_header(index, "X-Mine"),
            },
        }.get(what, shown))
    return results
"""

# As a handler that is a class with a module and a file beside it, whose batches are of requests that came together.
LENGTH = """
import json
from ts.torch_handler.base_handler import BaseHandler
from neighbour import offset

class Length(BaseHandler):
    def initialize(self, context):
        self.names = json.load(open("names.json"))
        self.initialized = True

    def preprocess(self, data):
        return [row.get("body") for row in data]

    def inference(self, texts):
        if "bad" in texts:
            raise ValueError("a bad text")
        return [len(text) + offset for text in texts]

    def postprocess(self, lengths):
        return [self.names.get(str(each), each) for each in lengths]
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    archive(
        root / "show.mar",
        {"handler.py": SHOW, "requirements.txt": "absent-package"},
        requirementsFile="requirements.txt",
    )
    files = {"lengths.py": LENGTH, "neighbour.py": "offset = 100", "names.json": '{"103": "three"}'}
    archive(root / "length.mar", files, "lengths.py")
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    table = f"batchSize: 4\nmaxBatchDelay: 10\nhandler: {{depth: 3}}\n{bomb}"
    code = "def handle(data, context):\n    return [[context.model_yaml_config['handler'], context.get_request_id(0) != ''] for row in data or ()]\n"
    archive(root / "config.mar", {"handler.py": code, "model-config.yaml": table}, configFile="model-config.yaml")
    return root


@pytest.fixture(scope="module")
def client(store: Path) -> Iterator[httpx.Client]:
    targets = [str(store / "show.mar"), str(store / "length.mar"), str(store / "config.mar")]
    with weir.running(*targets, spin=0.0) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        yield client


def ask(client: httpx.Client, what: str, **headers: str) -> httpx.Response:
    return client.post(
        "/predictions/show",
        files={"what": (None, what)},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


@subcases(
    ("content_type", "body", "row"),
    [
        ("", "a", {"body": ["bytearray", "a"]}),
        ("application/octet-stream", "a", {"body": ["bytearray", "a"]}),
        ("text/plain; charset=utf-8", "a", {"body": ["str", "a"]}),
        ("application/json; charset=utf-8", '{"a": [1]}', {"body": ["dict", {"a": [1]}]}),
        ("application/json", '{"a', {"body": ["bytearray", '{"a']}),
        ("application/x-www-form-urlencoded", "a=b+%41&c", {"a": ["bytearray", "b A"]}),
        ("application/x-www-form-urlencoded", "hello", {}),
    ],
)
def test_what_a_handler_gets_of_a_body(client: httpx.Client, content_type: str, body: str, row: Any) -> None:
    answer = client.put(
        "/predictions/show", content=body, headers={"Content-Type": content_type} if content_type else {}
    )
    assert (answer.status_code, answer.json()) == (200, row)


def test_what_a_handler_gets_of_a_form(client: httpx.Client) -> None:
    parts: Any = {
        "data": ("a.json", b'{"a": 1}', "application/json"),
        "x": (None, b"\r\n--1\r"),
        "n": ("b", b"\0", "image/png"),
    }
    answer = client.post("/predictions/show/1.0", files=parts)
    rows = {"data": ["dict", {"a": 1}], "x": ["bytearray", "\r\n--1\r"], "n": ["bytearray", "\0"]}
    assert (answer.status_code, answer.json()) == (200, rows)


@subcases(
    ("what", "status", "content_type", "body"),
    [
        ("bytes", 200, "application/octet-stream", b"\x00\xff"),
        ("text", 200, "text/plain; charset=utf-8", b"text"),
        ("none", 200, "application/json", b"null"),
        ("number", 200, "application/json", b"3"),
        ("status", 418, "text/x-mine", b"short"),
        ("nothing", 204, None, b""),  # with a body, the connection would be lost
    ],
)
def test_what_a_handler_returns(
    client: httpx.Client, what: str, status: int, content_type: str | None, body: bytes
) -> None:
    answer = ask(client, what)
    assert (answer.status_code, answer.headers.get("content-type"), answer.content) == (status, content_type, body)
    assert answer.headers.get("x-yours") == ("v" if what == "status" else None)


@subcases(
    ("what", "status", "message"),
    [
        ("raise", 503, "predict raised ValueError: broken"),
        ("refuse", 513, "not so"),
        ("too few", 503, "the handler returned 0 results for 1 item, must be one for each"),
        ("no list", 503, "the handler returned a str for 1 item, must be a list of 1"),
        ("header", 503, "the handler set the header 'x-yours', which no model may, or to a value that no header has"),
        ("word", 503, "encode raised ValidationError: Expected `int`, got `str`"),
        ("exit", 503, "it crashed its worker"),
    ],
)
def test_how_a_handler_fails(client: httpx.Client, what: str, status: int, message: str) -> None:
    answer = ask(client, what)
    assert (answer.status_code, answer.json()["code"], answer.json()["type"]) == (
        status,
        status,
        "InternalServerException",
    )
    assert message in answer.json()["message"]


@subcases(
    ("path", "body", "status", "kind"),
    [
        ("/predictions/none", b"", 404, "ModelNotFoundException"),
        ("/predictions/show/9.0", b"", 404, "ModelVersionNotFoundException"),
        ("/predictions/show", b"--a\r\nno end", 400, "BadRequestException"),
    ],
)
def test_what_is_refused(client: httpx.Client, path: str, body: bytes, status: int, kind: str) -> None:
    answer = client.post(path, content=body, headers={"Content-Type": "multipart/form-data; boundary=a"})
    assert (answer.status_code, answer.json()["type"]) == (status, kind)


def test_what_a_context_tells(client: httpx.Client, store: Path) -> None:
    told = ask(client, "context", X_Mine="3", X_Request_Id="seven").json()
    folder = told["model_dir"]
    assert told == {
        "model_dir": folder,
        "gpu_id": None,
        "batch_size": 1,
        "server_name": "MMS",
        "server_version": "0.12.0",
        "limit_max_image_pixels": True,
        "here": folder,
        "manifest": "show",
        "yaml": {},
        "id": "seven",
        "mine": "3",
    }
    metrics = client.get("/metrics").text
    assert 'Seen_total{model="show"}' in metrics and 'Took_ms{model="show",worker="0"} 2.5' in metrics


def test_a_configuration_whose_aliases_stand_for_gigabytes(client: httpx.Client) -> None:
    assert client.put("/predictions/config").json() == [{"depth": 3}, True]
    assert client.get("/v2/models/config/config").json()["max_batch_size"] == 4


def test_requests_in_other_protocols_reach_the_handler(client: httpx.Client) -> None:
    assert client.post("/infer/length", json="abc").json() == "three"
    assert client.post("/infer/length/batch", json=["", "abc"]).json() == [{"output": 100}, {"output": "three"}]


def test_a_bad_request_fails_alone(store: Path) -> None:
    with weir.running(str(store / "length.mar"), max_batch_size=8, spin=0.0) as server:
        answer = httpx.post(f"{server.address}/infer/length/batch", json=["a", "bad", "abc"]).json()
    assert [list(each) for each in answer] == [["output"], ["error", "code"], ["output"]]


def test_a_folder_and_a_tar_file_are_served_too(store: Path, tmp_path: Path) -> None:
    from weir.catalog.adapters.torchserve import unpack

    folder = tmp_path / "plain"
    folder.mkdir()
    unpack(store / "length.mar", folder, "length")
    with tarfile.open(tmp_path / "tarred.tar.gz", "w:gz") as made:
        made.add(folder, "tarred")  # as torch-model-archiver does
    with weir.running(str(folder), str(tmp_path / "tarred.tar.gz"), spin=0.0) as server:
        for name in ("plain", "tarred"):
            sent = {"Content-Type": "text/plain"}
            assert httpx.put(f"{server.address}/predictions/{name}", content="abc", headers=sent).text == "three"
    assert (folder / "lengths.py").is_file()  # it is not ours to remove


@pytest.mark.adapters
@pytest.mark.parametrize(("form", "ending"), [("default", ".mar"), ("tgz", ".tar.gz"), ("no-archive", "")])
def test_what_the_archiver_makes(tmp_path: Path, form: str, ending: str) -> None:
    for name, content in {
        "lengths.py": LENGTH,
        "neighbour.py": "offset = 100",
        "names.json": '{"103": "three"}',
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "model-config.yaml").write_text("batchSize: 4\n")
    words = ["--model-name", "made", "--version", "2.0", "--handler", "lengths.py", "--archive-format", form]
    words += ["--extra-files", "neighbour.py,names.json", "--config-file", "model-config.yaml"]
    program = "from model_archiver.model_packaging import generate_model_archive as make; make()"
    subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, check=True)
    with weir.running(str(tmp_path / f"made{ending}"), spin=0.0) as server:
        sent = {"Content-Type": "text/plain"}
        assert httpx.put(f"{server.address}/predictions/made/2.0", content="abc", headers=sent).text == "three"


def test_what_was_unpacked_is_removed_with_the_model(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with weir.running(str(store / "length.mar"), spin=0.0) as server:
        (first,) = os.listdir(tmp_path)
        load = f"{server.address}/v2/repository/models/length/"
        assert httpx.post(f"{load}load", timeout=60).status_code == 200
        (second,) = os.listdir(tmp_path)
        assert second != first
        assert httpx.post(f"{load}unload").status_code == 200
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("files", "handler", "settings", "why"),
    [
        ({}, "handler.py", {}, "handler='handler.py': must be a file of the archive or one of base_handler"),
        ({}, "text_classifier", {}, "its package (pip install torchserve captum pyyaml)"),
        ({"handler.py": ""}, "handler.py", {"executor": "thread"}, "executor='thread': must be process"),
        ({"../x": ""}, "handler.py", {}, "must be a path inside"),
        ({"c": "a: !!timestamp zz"}, "base_handler", {}, "c: must be YAML"),  # not an error of PyYAML's own
        ({"c": f"a: 1{':1' * 40_000}"}, "base_handler", {}, "c: is larger than 65536 bytes"),
    ],
)
def test_archives_that_cannot_be_served(
    tmp_path: Path, files: dict[str, str], handler: str, settings: dict[str, Any], why: str
) -> None:
    path = archive(tmp_path / "a.mar", files, handler, configFile="c" if "c" in files else None)
    model = ModelToServe(str(path), "a", {}, [], settings, platform="torchserve")
    with pytest.raises(SettingsError, match=r"^a: a.mar: ") as raised:
        make_service(located(model), ())
    assert why in raised.value.message


# As in TorchServe's examples: the base class loads the network of the archive.
TORCH = """
import torch
from ts.torch_handler.base_handler import BaseHandler

class Sums(BaseHandler):
    def preprocess(self, data):
        return torch.as_tensor([row.get("body") for row in data], dtype=torch.float32, device=self.device)

    def postprocess(self, data):
        from ts.utils.util import map_class_to_label
        return map_class_to_label(data.tolist(), self.mapping, [[0, 1]] * len(data))
"""
NETWORK = """
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)
"""


@pytest.mark.torch
def test_networks_of_torch(tmp_path: Path) -> None:
    import torch

    network = torch.nn.Linear(3, 2)
    state = {f"layer.{name}": value for name, value in network.state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    with warnings.catch_warnings(action="ignore"):  # TorchServe's users have such files
        torch.jit.trace(network, torch.zeros(1, 3)).save(str(tmp_path / "scripted.pt"))
    files: dict[str, str | bytes] = {
        "handler.py": TORCH,
        "index_to_name.json": '{"0": ["n", "zero"], "1": "one"}',
        "network.py": NETWORK,
    }
    eager = archive(
        tmp_path / "eager.mar",
        {**files, "w.pt": (tmp_path / "weights.pt").read_bytes()},
        serializedFile="w.pt",
        modelFile="network.py",
    )
    scripted = archive(
        tmp_path / "scripted.mar", {**files, "s.pt": (tmp_path / "scripted.pt").read_bytes()}, serializedFile="s.pt"
    )
    item = [0.5, -1.0, 2.0]
    zero, one = network(torch.tensor(item)).tolist()
    with weir.running(str(eager), str(scripted), spin=0.0) as server:
        for name in ("eager", "scripted"):
            answer = httpx.post(f"{server.address}/predictions/{name}", json=item, timeout=60)
            assert answer.json() == pytest.approx({"zero": zero, "one": one})


# Networks whose outputs are those that each handler expects, made of the mean of each colour.
OF_COLOURS = """
import torch

class Network(torch.nn.Module):
    def forward(self, images):
        colours = images.mean((2, 3))
        return {}
"""
_BOXES = '[{"boxes": torch.outer(one, torch.ones(4)), "labels": torch.arange(3), "scores": one} for one in colours]'


@pytest.mark.vision
@subcases(
    ("handler", "output"),
    [
        ("image_classifier", "torch.cat([colours, 2 * colours], 1)"),
        ("image_segmenter", '{"out": images}'),
        ("object_detector", _BOXES),
    ],
)
def test_handlers_of_images(tmp_path: Path, handler: str, output: str) -> None:
    torch, transforms = pytest.importorskip("torch"), pytest.importorskip("torchvision.transforms")
    pillow = pytest.importorskip("PIL.Image")
    across = pillow.linear_gradient("L")
    picture = pillow.merge(
        "RGB", [pillow.radial_gradient("L"), across.point(lambda value: value // 4), across.rotate(-90)]
    ).crop((0, 0, 200, 240))
    picture.save(tmp_path / "a.png")
    names = {str(number): f"class {number}" for number in range(6)}
    files = {"network.py": OF_COLOURS.format(output), "index_to_name.json": json.dumps(names)}
    path = archive(tmp_path / "images.mar", files, handler, modelFile="network.py")
    normal = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    middle = transforms.CenterCrop(224)(transforms.Resize(256)(picture))
    image = transforms.ToTensor()(picture) if handler == "object_detector" else normal(transforms.ToTensor()(middle))
    colours = image.mean((1, 2))
    with weir.running(str(path), spin=0.0) as server:
        url = f"{server.address}/predictions/images"
        found = httpx.put(url, content=(tmp_path / "a.png").read_bytes(), timeout=60).json()
        assert httpx.post(url, files={"data": (tmp_path / "a.png").read_bytes()}).json() == found
    if handler == "image_classifier":
        shares = torch.softmax(torch.cat([colours, 2 * colours]), 0).tolist()
        best = sorted(range(6), key=lambda number: -shares[number])[:5]
        assert found == pytest.approx({names[str(number)]: shares[number] for number in best}, rel=1e-4)
        assert list(found) == [names[str(number)] for number in best]
    elif handler == "image_segmenter":
        best = torch.max(torch.softmax(image, 0), 0)
        assert torch.tensor(found).permute(2, 0, 1).allclose(torch.stack([best.indices, best.values]), rtol=1e-4)
    else:
        kept = [(f"class {number}", share) for number, share in enumerate(colours.tolist()) if share >= 0.5]
        boxes = [{name: pytest.approx([share] * 4, rel=1e-4), "score": pytest.approx(share)} for name, share in kept]
        assert found == boxes


def test_settings_of_torchserve_are_ours() -> None:
    given = {
        "batchSize": 8,
        "maxBatchDelay": 50,
        "minWorkers": 2,
        "responseTimeout": 20,
        "jobQueueSize": 10,
        "deviceType": "cpu",
    }
    assert settings_from(given, "here") == {
        "max_batch_size": 8,
        "workers": 2,
        "predict_timeout": 20.0,
        "max_queue_size": 10,
        "policy": "size-or-delay:delay=0.05",
        "max_queue_delay": 0.05,
    }
    assert settings_from({"batchSize": 1, "maxBatchDelay": 50, "minWorkers": 0}, "here") == {"max_batch_size": 1}
    with pytest.raises(SettingsError, match="here: batchSize='many': must be a number from 0 on"):
        settings_from({"batchSize": "many"}, "here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "unpacked"
    made.mkdir()
    return made


def tarred(path: Path, *members: tarfile.TarInfo, content: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as made:
        for member in members:
            made.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return path


def test_a_zip_file_and_a_tar_file_are_unpacked_alike(tmp_path: Path, folder: Path) -> None:
    unpack(archive(tmp_path / "a.mar", {"handler.py": "x = 1", "deep/er.txt": b"\0"}), folder, "a")
    assert read_manifest(folder, "a")["model"]["handler"] == "handler.py"
    assert (folder / "deep" / "er.txt").read_bytes() == b"\0"

    other = tmp_path / "other"
    other.mkdir()
    of_all = {"comment": "0123456789abcdef"}  # as `git archive` has it
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tarfile.PAX_FORMAT, pax_headers=of_all) as made:
        made.add(folder, ".")
    unpack(tmp_path / "a.tar.gz", other, "a")
    assert sorted(path.relative_to(other) for path in other.rglob("*")) == sorted(
        path.relative_to(folder) for path in folder.rglob("*")
    )


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "a\\..\\evil", "x" * 2000, "."])
def test_a_name_outside_of_the_archive_is_refused(tmp_path: Path, folder: Path, name: str) -> None:
    for made in (archive(tmp_path / "a.mar", {name: "x"}), tarred(tmp_path / "a.tgz", tarfile.TarInfo(name))):
        with pytest.raises(SettingsError, match=r"^here: has a file .*: must be a path inside of it"):
            unpack(made, folder, "here")
    assert not list(tmp_path.rglob("evil"))


def zip_link(path: Path) -> Path:
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(info, "/etc/passwd")
    return path


def tar_link(kind: bytes) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = kind, "/etc/passwd"
        return tarred(path, info)

    return make


@pytest.mark.parametrize(
    "make", [zip_link, tar_link(tarfile.SYMTYPE), tar_link(tarfile.LNKTYPE), tar_link(tarfile.CHRTYPE)]
)
def test_links_and_devices_are_refused(tmp_path: Path, folder: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(SettingsError, match=r"'link' is a link or a device"):
        unpack(make(tmp_path / "a.mar"), folder, "here")
    assert not list(folder.iterdir())


def test_more_content_than_its_limit_is_refused_unread(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchserve, "_ALWAYS_FITS", 1000)
    with zipfile.ZipFile(tmp_path / "a.mar", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("small", "x")
        made.writestr("bomb", bytes(1 << 20))
    big = tarfile.TarInfo("bomb")
    big.size = 1 << 20
    for bomb in (tmp_path / "a.mar", tarred(tmp_path / "a.tgz", big, content=bytes(1 << 20))):
        with pytest.raises(
            SettingsError, match=r"or more than [0-9]+ bytes of them; if you trust it, unpack it and serve the folder"
        ):
            unpack(bomb, folder, "here")
        assert not (folder / "bomb").exists()


@pytest.mark.parametrize(
    ("kind", "content", "why"),
    [
        (tarfile.GNUTYPE_LONGNAME, b"x" * 5000, "has a header of 5000 bytes, must be at most 4096"),
        (
            tarfile.XHDTYPE,
            b"1" * 5000,
            "has a header of 5000 bytes, must be at most 4096",
        ),  # tarfile's time is quadratic
        (tarfile.XHDTYPE, b"0 a=b\n", "has a record of 0 bytes in a header"),
        (tarfile.XHDTYPE, b"13 size=-512\n", "'file' has -512 bytes"),
        (tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n", "'file' is a link or a device"),
        (tarfile.XGLTYPE, b"1" * 5000, "has a header of 5000 bytes, must be at most 4096"),
    ],
)
def test_headers_that_would_cost_more_than_their_size(
    tmp_path: Path, folder: Path, kind: bytes, content: bytes, why: str
) -> None:
    more, file = tarfile.TarInfo("more"), tarfile.TarInfo("file")
    more.type, more.size = kind, len(content)
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as made:
        made.addfile(more, io.BytesIO(content))
        made.addfile(file)
    with pytest.raises(SettingsError) as raised:
        unpack(tmp_path / "a.tgz", folder, "here")
    assert why in raised.value.message


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_values_of_a_tar_file(tmp_path: Path, folder: Path, form: int) -> None:
    info = tarfile.TarInfo(name := f"é/{'x' * 200}")
    info.size, info.mtime = 600, 1.5
    with tarfile.open(tmp_path / "a.tgz", "w:gz", format=form) as made:
        made.addfile(info, io.BytesIO(bytes(600)))
        made.addfile(tarfile.TarInfo("last"))
    unpack(tmp_path / "a.tgz", folder, "here")
    assert ((folder / name).read_bytes(), (folder / "last").read_bytes()) == (bytes(600), b"")


def test_a_tar_file_that_ends_within_a_file(tmp_path: Path, folder: Path) -> None:
    info = tarfile.TarInfo("cut")
    info.size = 5000
    (tmp_path / "a.tgz").write_bytes(gzip.compress(info.tobuf() + bytes(512)))
    with pytest.raises(SettingsError, match="it ends within a file"):
        unpack(tmp_path / "a.tgz", folder, "here")


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_whose_pieces_have_no_bound_is_refused(tmp_path: Path, folder: Path, how: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.mar", "w", how) as made:
        made.writestr("small", bytes(1000))
    with pytest.raises(SettingsError, match="must be stored or deflated"):
        unpack(tmp_path / "a.mar", folder, "here")


def test_too_many_files_are_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchserve, "MAX_FILES", 3)
    folders = [tarfile.TarInfo(f"{number}") for number in range(4)]
    for each in folders:
        each.type = tarfile.DIRTYPE
    for many in (
        archive(tmp_path / "a.mar", {f"{number}": "" for number in range(3)}),
        tarred(tmp_path / "a.tgz", *folders),
    ):
        with pytest.raises(SettingsError, match=r"has more than 3 files"):
            unpack(many, folder, "here")


def test_a_name_that_comes_twice_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be unpacked: .*File exists: .*/x'"):
        unpack(tarred(tmp_path / "a.mar", tarfile.TarInfo("x"), tarfile.TarInfo("x")), folder, "here")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x1f\x8b\x08 no tar", b"none at all" * 100])
def test_what_is_no_archive_is_refused(tmp_path: Path, folder: Path, content: bytes) -> None:
    (tmp_path / "a.mar").write_bytes(content)
    with pytest.raises(SettingsError, match=r"^here: is damaged, or no archive"):
        unpack(tmp_path / "a.mar", folder, "here")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "must have a `model` with a `handler`"),
        ('{"model": {"handler": 3}}', "must have a `model` with a `handler`"),
        (manifest("a", serializedFile="lost.pt"), "serializedFile='lost.pt': must be a file of the archive"),
        (manifest("a", modelFile="../../etc/passwd"), "modelFile='../../etc/passwd': must be a file of the archive"),
        (manifest("a", configFile={}), "configFile={}: must be a file of the archive"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(folder: Path, text: str | None, why: str) -> None:
    (folder / "MAR-INF").mkdir()
    if text is not None:
        (folder / "MAR-INF" / "MANIFEST.json").write_text(text)
    with pytest.raises(SettingsError, match=r"^here: MAR-INF/MANIFEST.json: ") as raised:
        read_manifest(folder, "here")
    assert why in raised.value.message
