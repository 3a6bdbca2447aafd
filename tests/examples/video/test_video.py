"""Two real videos from a local HTTP server, and other callers' pictures, share the batches of one image model."""

import asyncio
import functools
import http.server
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
from examples.video.app import services
from examples.video.fetching import Rules, fetch
from examples.video.frames import frames
from examples.video.models import SIZE
from tests.late import av
from tests.rings import subcases
from websockets.asyncio.client import connect

import weir
from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.frontends.http.server import HttpServer
from weir.frontends.websocket import WebSockets
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext
from weir.wire.inference import InferenceResponse
from weir.wire.websocket import read_response

pytestmark = pytest.mark.usefixtures("nothing_is_left")
RED, BLUE = (250, 10, 10), (10, 10, 250)
AWAY = "http://localhost:1/red.mp4"
REDIRECTED = {"/to-file": "file:///etc/passwd", "/away": AWAY, "/round": "/round", "/ok": "/red.mp4"}


def make_video(path: Path, container: str, codec: str, colour: tuple[int, int, int], count: int) -> None:
    with av.open(path, "w", format=container) as file:
        stream = file.add_stream(codec, rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        picture = numpy.full((64, 96, 3), colour, "uint8")
        for _ in range(count):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path not in REDIRECTED:
            return super().do_GET()
        self.send_response(302)
        self.send_header("Location", REDIRECTED[self.path])
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def videos(tmp_path: Path) -> Iterator[str]:
    """Where the videos are served: host and port."""
    folder = tmp_path / "videos"
    folder.mkdir()
    make_video(folder / "red.mp4", "mp4", "mpeg4", RED, 40)
    make_video(folder / "blue.webm", "webm", "libvpx", BLUE, 40)
    (folder / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nred.mp4\n#EXT-X-ENDLIST\n")
    (folder / "page.html").write_text("<p>no video</p>")
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@asynccontextmanager
async def serving(hosts: list[str], ledger: str = "") -> AsyncIterator[str]:
    """A server of the example's models; where it is."""
    registry, settings = Registry(services(hosts, ledger)), HttpSettings(port=0)
    websockets = WebSockets(registry, settings)
    context = KserveContext(registry, settings)
    server = HttpServer(context, make_app(context, websockets=websockets), websockets=websockets)
    await registry.start()
    await server.start()
    try:
        yield f"ws://127.0.0.1:{server.port}/models/infer"
    finally:
        await registry.stop(0.0)
        await server.stop()


async def watch(where: str, address: str) -> list[dict[str, Any]]:
    """Ask for the colours of a video's frames."""
    tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": [json.dumps(address)]}
    async with connect(where) as client:
        await client.send(json.dumps({"model_name": "video", "id": "1", "inputs": [tensor]}))
        said: list[dict[str, Any]] = []
        while True:
            answer = read_response(await client.recv())
            if not isinstance(answer, InferenceResponse):
                raise weir.InvalidRequest(answer.error)
            said += [json.loads(value) for output in answer.outputs for value in output.array]
            if answer.parameters["triton_final_response"]:
                return said


async def look(where: str, until: "asyncio.Future[Any]") -> None:
    """Ask for the colours of green pictures, one after the other, until then."""
    picture = numpy.zeros((1, SIZE, SIZE, 3), "uint8")
    picture[..., 1] = 200
    data = picture.ravel().tolist()
    tensor = {"name": "image", "datatype": "UINT8", "shape": list(picture.shape), "data": data}
    async with connect(where) as client:
        while not until.done():
            await client.send(json.dumps({"model_name": "colours", "inputs": [tensor]}))
            answer = read_response(await client.recv())
            assert isinstance(answer, InferenceResponse)
            assert answer.outputs[0].array.tolist() == [[0.0, 200.0, 0.0]]


async def test_frames_of_two_videos_and_other_pictures_share_batches(videos: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    times = 0
    async with serving([videos], str(ledger)) as where:
        while not times or not any(set(batch) == {"r", "g", "b"} for batch in ledger.read_text().split()):
            both = [watch(where, f"http://{videos}/{name}") for name in ("red.mp4", "blue.webm")]
            watching = asyncio.gather(*both)
            await asyncio.gather(watching, look(where, watching), look(where, watching))
            red, blue = await watching
            times += 1
    assert [said["frame"] for said in red] == [said["frame"] for said in blue] == list(range(40))
    assert [round(said["seconds"] * 25) for said in red] == list(range(40))
    assert all(said["red"] > 200 > 60 > said["blue"] for said in red)
    assert all(said["blue"] > 200 > 60 > said["red"] for said in blue)
    computed = "".join(ledger.read_text().split())
    assert computed.count("r") == computed.count("b") == 40 * times


NO_VIDEOS = {
    "/nothing.mp4": "cannot be read .*404",
    "/page.html": "cannot be decoded",
    "/list.m3u8": "cannot be decoded",
    "/to-file": "must begin with http",
    "/away": r"videos are read from 127\.0\.0\.1:\d+ only",
    "/round": "redirects more than 3 times",
}


async def test_what_is_no_video_is_the_callers_fault(videos: str) -> None:
    async with serving([videos]) as where:
        for path, text in NO_VIDEOS.items():
            with pytest.raises(weir.InvalidRequest, match=text):
                await watch(where, f"http://{videos}{path}")


def test_redirects_to_allowed_hosts_are_followed(videos: str) -> None:
    with fetch(f"http://{videos}/ok", Rules([videos])) as file:
        assert sum(1 for _ in frames(file, 8)) == 40


@subcases(
    ("rules", "text"),
    [(Rules(["*"]), "only"), (Rules(), "no host only"), (Rules(["%"], max_bytes=100), "is larger than 100 bytes")],
)
def test_nothing_is_read_but_what_the_rules_allow(videos: str, rules: Rules, text: str) -> None:
    allowed = Rules([videos if host == "%" else host for host in rules.hosts], rules.max_bytes)
    with pytest.raises(weir.InvalidRequest, match=text):
        fetch(f"http://{videos}/red.mp4", allowed)


@subcases(
    ("address", "text"),
    [
        ("file:///etc/passwd", "must begin with http"),
        ("ftp://good.example/x", "must begin with http"),
        ("/etc/passwd", "must begin with http"),
        ("http://[", "must be a URL"),
        ("http://good.example:x/", "must be a URL"),
        ("http://me:secret@good.example/x", "no user and no password"),
        ("http://good.example@evil.example/x", "no user and no password"),
        ("http://evil.example/x", "from good.example, other.example:81 only"),
        ("http://good.example:81/x", "from good.example"),
        ("http://other.example/x", "from good.example"),
        ("http://good.example.evil.example/x", "from good.example"),
    ],
)
def test_addresses_that_may_not_be_called(address: str, text: str) -> None:
    with pytest.raises(weir.InvalidRequest, match=text):
        Rules(["good.example", "other.example:81"]).check(address)


def test_addresses_that_may() -> None:
    for url in (
        "http://good.example/x",
        "https://GOOD.example/x",
        "http://good.example:80/",
        "https://other.example:81/x",
    ):
        assert Rules(["good.example", "other.example:81"]).check(url) == url
