import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from tests.catalog.repository.shelf import write
from tests.fronts.kit import Gate
from tests.rings import subcases
from tests.served import MODELS, Served, serving, still_running, target, until, weir, weir_here
from tests.test_on_demand import NAMED

from weir.client import AsyncHttpClient, AsyncWebSocketClient, HttpClient, WebSocketClient
from weir.client.calls import NEVER, Unreachable
from weir.commands import COMMANDS
from weir.commands.options import EXAMPLES
from weir.errors import DeadlineExceeded, SettingsError
from weir.settings import declared_settings

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def connected(served: Served) -> socket.socket:
    host, _, port = served.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)))


class Pipes(Gate):
    """The two named pipes of a Gated model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.config = folder / "weir.toml"
        self.config.write_text(
            f'[models.gated]\ntarget = "{target("Gated")}"\nparams = {{ begun = "{self.begun}", gate = "{self.gate}" }}\n'
        )
        self.flags = self.arguments[1:5]

    def wait_until_begun(self) -> None:
        assert self.begun.read_text() == "begun"


@pytest.fixture
def pipes(tmp_path: Path) -> Pipes:
    return Pipes(tmp_path)


THREADS = ThreadPoolExecutor(8)


def asking(served: Served, item: Any) -> "Future[httpx.Response]":
    """A request under way in a thread."""
    return THREADS.submit(httpx.post, f"{served.url}/infer/gated", json=item)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """One server for the tests that only ask it something; each counts on a model of its own."""
    models = (target(name) for name in ("Square", "Power", "Environment", "Doubled"))
    with serving(*models, "--env", "A=1", "--env", "B=x,y=z") as (served, _):
        yield served


@pytest.fixture
def client(shared: Served) -> Iterator[httpx.Client]:
    """Ask the shared server."""
    with httpx.Client(base_url=shared.url, timeout=60) as asking:
        yield asking


# What people see.


def shown_flags(*words: str) -> set[str]:
    shown = weir_here(*words, env={"COLUMNS": "300"}).stdout
    return set(re.findall(r"^│ (--[a-z-]+)", shown, re.MULTILINE)) - {"--config", "--help"}


def test_help_shows_what_people_use_and_by_a_word_everything() -> None:
    declared = declared_settings().values()
    assert shown_flags("help", "serve") == {each.flag for each in declared if each.name in EXAMPLES}
    assert shown_flags("serve", "--help=all") == {each.flag for each in declared}
    assert shown_flags("serve", "--help=jobs") == {each.flag for each in declared if each.part == "Batch jobs"}
    assert shown_flags("serve", "square:Square", "--help=tls") == {"--tls-certfile", "--tls-keyfile"}
    nothing = weir_here("serve", "--help=swagger")
    assert nothing.returncode == 2
    assert "--help=swagger: no option has this word; must be all, a word, or a heading: Access" in nothing.stderr


@subcases(("name", "example"), COMMANDS.items())
def test_the_help_of_a_command_has_an_example(name: str, example: str) -> None:
    assert f"Example: {example}" in weir_here(name, "--help", env={"COLUMNS": "300"}).stdout
    assert example.startswith(f"weir {name} ")


def test_a_timeout_has_the_status_that_was_chosen() -> None:
    with serving(target("Slow"), "--timeout-status", "408") as (served, client):
        late = client.post("/infer/slow", json=1, headers={"X-Request-Timeout": "0.05"})
        assert (late.status_code, late.json()["error"]["type"]) == (408, "DeadlineExceeded")
        page = client.get("/openapi.json").json()["paths"]["/infer/slow"]["post"]["responses"]
        assert "408" in page and "504" not in page
        with HttpClient(served.url) as calling, pytest.raises(DeadlineExceeded):
            calling.infer("slow", 1, timeout=0.05)


def test_the_table_says_what_is_served_and_a_curl_line_works() -> None:
    with serving(target("Square"), "--workers", "2", "--max-batch-size", "8", "--route", "/sq") as (served, client):
        heads, line = (re.split(r"  +", text.strip()) for text in served.table.splitlines()[:2])
        assert heads == ["model", "workers", "policy", "max batch", "routes", "url"]
        assert line == ["square", "2 processes", "greedy", "8", "/infer/square /sq", served.url]
        assert f"curl -d 3 {served.url}/infer/square" in served.table
        assert client.post("/sq", json=5).json() == 25


def test_a_model_without_requests_has_no_worker_and_the_next_one_waits() -> None:
    with serving(target("Square"), "--workers", "0..2", "--scale-to-zero-after", "0.3") as (served, client):
        assert "1 process of 0..2" in served.table

        def scaling() -> dict[str, Any]:
            explained: dict[str, Any] = client.get("/models/square/policy").json()["scaling"]
            return explained

        until(lambda: not scaling()["present"])
        assert scaling()["because"] == "no request arrived for 0.3 s"
        assert client.get("/health/ready").status_code == 200
        assert "weir_workers_wanted{" in client.get("/metrics").text
        first = client.post("/infer/square", json=3)
        assert first.json() == 9
        assert float(first.headers["x-start-time"]) > 0.0
        until(lambda: "x-start-time" not in client.post("/infer/square", json=4).headers)
        until(lambda: not scaling()["present"])
        tensor = {"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["4"]}]}
        woken = client.post("/v2/models/square/infer", json=tensor).json()
        assert woken["outputs"][0]["data"] == ["16"] and woken["parameters"]["start_time"] > 0.0


async def test_clients_reach_a_unix_socket(tmp_path: Path) -> None:
    path, ones = tmp_path / "weir.sock", {"x": np.ones((1, 2), np.float32)}
    with WebSocketClient(f"unix:{path}", retry=NEVER) as client:
        with pytest.raises(Unreachable, match=r"weir\.sock: no connection"):
            client.infer("scale", ones)
        with Served(target("Square"), f"{MODELS.parent}/client/models.py:Scale", "--uds", str(path)) as served:
            served.until_ready()
            assert f"curl --unix-socket {path} -d 3 http://localhost/infer/square" in served.table
            assert client.infer("scale", ones)["y"].tolist() == [[2, 2]]
            async with AsyncWebSocketClient(f"unix:{path}") as websocket, AsyncHttpClient(f"unix://{path}") as http:
                assert (await websocket.infer("scale", ones))["y"].tolist() == [[2, 2]]
                assert await http.infer("square", 4) == 16
            with HttpClient(f"unix:{path}") as ours:
                assert ours.infer("square", 3) == 9
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as other:
                curl = {"Content-Type": "application/x-www-form-urlencoded"}
                assert (await other.post("http://localhost/infer/square", content="3", headers=curl)).text == "9"
            served.signal(signal.SIGTERM)
            assert served.wait() == 0
    with pytest.raises(SettingsError, match="url='unix:': must be http://HOST:PORT, https://HOST:PORT or unix:PATH"):
        HttpClient("unix:")


# Settings.


def test_settings_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    config = tmp_path / "weir.toml"
    config.write_text(
        f'timeout = 11\nworkers = 1\n[models.cube]\ntarget = "{target("Power")}"\nparams = {{ exponent = 3 }}\n'
        f'[models.power]\nmax_queue_size = 9\n'
    )  # fmt: skip
    arguments = (target("Power"), "--config", config, "--predict-timeout", "13")
    with serving(*arguments, env={"WEIR_MAX_QUEUE_DELAY": "0.25"}) as (_, client):
        assert client.post("/infer/cube", json=3).json() == 27
        assert client.post("/infer/power", json=3).json() == 9
        cube = client.get("/models/cube").json()["settings"]
        power = client.get("/models/power").json()["settings"]
        for settings in (cube, power):
            assert (settings["timeout"], settings["predict_timeout"], settings["max_queue_delay"]) == (11, 13, 0.25)
            assert settings["max_batch_size"] == 7  # the class says so
        assert (cube["max_queue_size"], power["max_queue_size"]) == (1024, 9)


@subcases(
    ("arguments", "said"),
    [
        (["nowhere:Square"], "no module 'nowhere'"),
        (["nowhere.py:Square"], "no file "),
        ([target("Sqare")], "has no 'Sqare'; its models: Square"),
        ([target("Square"), "--workers", "4..1"], "--workers='4..1': must be 1 or more, or the fewest and the most"),
        ([target("Square"), "--workers=1..2", "--executor=inline"], "a range needs workers that the server starts"),
        ([target("Square"), "--target-load", "2"], "--target-load=2.0: must be greater than 0 and at most 1"),
        ([target("Square"), "--max-batchsize", "3"], "No such option: --max-batchsize"),
        ([target("Square"), "--policy", "gredy"], "gredy"),
        ([target("Square"), "--config", "a", "--config", "b"], "--config: given 2 times"),
        ([target("Square"), "--route", "/metrics"], "reserved"),
        ([target("Square"), "--timeout-status", "500"], "--timeout-status=500: must be"),
        ([target("Power"), "--param", "exp=3"], "unexpected keyword argument 'exp'; Power takes (exponent: int = 2)"),
        ([], "nothing to serve"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    run = weir_here("serve", *arguments)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and run.stderr.startswith("weir: ") and said in run.stderr


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = weir("serve", target("Square"), "--port", taken.getsockname()[1], "--log-level", "warning")
    assert run.returncode != 0 and run.stderr.count("\n") == 1
    assert str(taken) and "use" in run.stderr


def test_the_access_log_is_written_when_it_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "weir.log"
    tensor = {"name": "input", "datatype": "INT64", "shape": [2], "data": [3, 4]}
    with serving(target("Square"), "--log-file", file, "--access-log") as (served, client):
        client.post("/infer/square", json=3)
        client.post("/infer/square", json="a")
        client.post("/infer/square/batch", json=[3, 4])
        client.post("/v2/models/square/infer", json={"inputs": [tensor]})
        client.get("/no/such/page")
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["code"] for line in lines if line["event"] == "request"] == ["200", "500", "200", "400"]
    paths = [line["path"] for line in lines if line["event"] == "http" and not line["path"].startswith("/health")]
    expected = ["/infer/square", "/infer/square", "/infer/square/batch", "/v2/models/square/infer", "/no/such/page"]
    assert paths == expected


def rest_of(served: Served) -> tuple[str, str]:
    """Return what it wrote that nobody has read, once it has ended."""
    assert served.wait() == 0
    assert served.process.stdout is not None
    assert served.process.stderr is not None
    return served.process.stdout.read(), served.process.stderr.read()


SAID = ("printed in load", "printed a", "complained a", "logged a", "written by a library in C", "model error")


def test_where_lines_are_json_all_are_and_the_file_has_them_too(tmp_path: Path) -> None:
    file = tmp_path / "weir.log"
    with Served(target("Talks"), "--log-format", "json", "--log-file", file) as served:
        served.until_ready()
        for item in ("a", "fail"):
            httpx.post(f"{served.url}/infer/talks", json=item)
        served.signal(signal.SIGTERM)
        out, log = rest_of(served)
        shown = [json.loads(line) for line in (served.log + log + out).splitlines()]
    printed = {json.loads(line)["event"] for line in out.splitlines()}
    assert printed == {"printed in load", "printed a", "printed fail"}
    for lines in (shown, [json.loads(line) for line in file.read_text().splitlines()]):
        by_event = {line["event"]: line for line in lines}
        life = ["listening", "ready", "draining", "stopped"]
        assert [event for event in by_event if event in life] == life
        assert {*SAID, "worker ready"} <= by_event.keys()
        assert not {"request", "http"} & by_event.keys()  # the access log is off
        logged = by_event["logged a"]
        assert (logged["level"], logged["logger"], logged["worker"]) == ("warning", "talks", "talks/0")


def test_a_text_log_goes_on_as_it_is_beside_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weir.log"
    with Served(target("Talks"), "--log-file", file) as served:
        served.until_ready()
        httpx.post(f"{served.url}/infer/talks", json="a")
        served.signal(signal.SIGTERM)
        out, log = rest_of(served)
    assert served.table.startswith("printed in load\n")
    assert out.splitlines()[-1] == "printed a"
    assert "complained a\n" in log
    logged = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[warning  \] logged a \[talks\] worker=talks/0\n"
    assert re.search(logged, log, re.MULTILINE)
    assert set(SAID[:-1]) <= {json.loads(line)["event"] for line in file.read_text().splitlines()}


def test_why_a_start_failed_is_json_too() -> None:
    run = weir("serve", target("Broken"), "--port", "0", "--log-format", "json")
    assert run.returncode == 1
    lines = [json.loads(line) for line in (run.stdout + run.stderr).splitlines()]
    assert any(line["level"] == "critical" and "weights.bin is not there" in line["event"] for line in lines)


@subcases(
    ("words", "env", "said"),
    [
        (("--log-format", "json", "--max-batch-size", "x"), {}, "--max-batch-size"),
        (("--log-format=json", "--no-such-option"), {}, "--no-such-option"),
        (("--max-batch-size", "0"), {"WEIR_LOG_FORMAT": "json"}, "--max-batch-size"),
    ],
)
def test_what_is_wrong_with_a_setting_is_json_too(words: tuple[str, ...], env: dict[str, str], said: str) -> None:
    run = weir_here("serve", target("Square"), *words, env=env)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = [json.loads(line) for line in run.stderr.splitlines()]
    assert (line["level"], line["logger"]) == ("critical", "weir")
    assert said in line["event"]


def test_the_environment_of_workers(client: httpx.Client) -> None:
    assert client.post("/infer/environment/batch", json=["A", "B"]).json() == [{"output": "1"}, {"output": "x,y=z"}]


def test_the_server_may_be_kept_on_some_cpus_and_its_workers_are_not(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    config = tmp_path / "weir.toml"
    models = {"processes": "Cpus", "threads": "Cpus", "chosen": "Cpus", "shared": "SharedCpus"}
    tables = [f'[models.{name}]\ntarget = "{MODELS}:{kind}"\n' for name, kind in models.items()]
    tables[1] += 'executor = "thread"\n'
    tables[2] += f"cpu_affinity = [{allowed[-1]}]\n"
    config.write_text("".join(tables))
    with serving("--config", config, "--server-cpu-affinity", allowed[0]) as (served, client):
        assert os.sched_getaffinity(served.process.pid) == {allowed[0]}
        answers = {name: client.post(f"/infer/{name}", json=0).json() for name in models}
    assert answers == {"processes": allowed, "threads": allowed, "chosen": allowed[-1:], "shared": allowed}
    wrong = weir("serve", f"{MODELS}:Cpus", "--port", "0", "--server-cpu-affinity", "999")
    assert (wrong.returncode, "server_cpu_affinity=[999]: must be among" in wrong.stderr) == (2, True)


def test_a_target_may_be_a_service_with_hooks(client: httpx.Client) -> None:
    assert client.post("/infer/doubled", json=3).json() == 36


# Metrics.


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    assert [client.post("/infer/power", json=n).status_code for n in range(5)] == [200] * 5
    assert client.post("/infer/power", content="{").status_code == 400
    text = client.get("/metrics").text
    assert 'weir_requests_total{code="200",frontend="http",model="power"} 5.0' in text
    assert 'weir_requests_total{code="400",frontend="http",model="power"} 1.0' in text
    cut = sum(float(n) for n in re.findall(r'^weir_batches_total{.*model="power".*} (\S+)$', text, re.MULTILINE))
    assert cut > 0 and f'weir_batch_size_count{{model="power"}} {cut}' in text
    assert 'weir_workers{model="power",state="ready"} 1.0' in text
    assert 'weir_received_bytes_total{frontend="http",model="power"}' in text


def test_what_goes_wrong_in_a_worker_is_logged_and_counted() -> None:
    with serving(target("Square")) as (served, client):
        for path in ("/infer/square", "/infer/square/batch"):
            client.post(path, json=["a"])
            served.until_logged(r"model error .*error=.*TypeError.* model=square type=TypeError")
            served.until_logged("in predict")
        (worker,) = client.get("/models/square").json()["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        served.until_logged(r"\[warning.*worker lost")
        served.until_logged("worker ready")
        assert 'weir_worker_restarts_total{model="square"} 1.0' in client.get("/metrics").text
        assert client.post("/infer/square", json=3).json() == 9


# Start and stop.


def test_why_a_start_failed_is_one_line_whatever_the_model_raised() -> None:
    run = weir("serve", target("Lines"), "--port", "0")
    assert run.returncode == 1
    assert "in load" in run.stderr  # the traceback in the worker
    last = run.stderr.splitlines()[-1]
    assert last.startswith("weir: ") and last.endswith(r"ValueError: one\ntwo\x1b[2J")


def test_while_models_load_the_server_is_live_but_not_ready_and_may_end(pipes: Pipes) -> None:
    with Served(target("SlowToLoad"), *pipes.flags) as served:
        served.until_listening()
        pipes.wait_until_begun()
        assert httpx.get(f"{served.url}/health/live").status_code == 200
        assert httpx.get(f"{served.url}/health/ready").status_code == 503
        refused = httpx.post(f"{served.url}/infer/slowtoload", json=3)
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "ModelNotReady"
        children = served.children()
        served.signal(signal.SIGINT)
        assert served.wait() == 0
        assert children and not any(child.is_running() for child in children)


def test_no_process_warns_of_what_it_leaves_open_at_its_end(tmp_path: Path) -> None:
    write(tmp_path, {"m0/1/model.py": NAMED.format(name="m0")})
    demand = ("--model-repository", tmp_path, "--model-control", "on-demand")
    with Served(target("Square"), "--fronts", "2", *demand, env={"PYTHONWARNINGS": "always"}) as served:
        served.until_ready()
        assert httpx.post(f"{served.url}/infer/m0", json=3).json() == ["m0", 3]
        served.signal(signal.SIGTERM)
        assert "ResourceWarning" not in rest_of(served)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_finishes_what_was_accepted_and_refuses_the_rest(pipes: Pipes, number: signal.Signals) -> None:
    with Served(target("Gated"), *pipes.flags, "--max-batch-size", "1") as served:
        served.until_ready()
        running = asking(served, "running")
        pipes.wait_until_begun()
        waiting = asking(served, "waiting")
        with httpx.Client(base_url=served.url) as client:
            until(lambda: client.get("/models/gated").json()["waiting"] == 1)
            served.signal(number)
            until(lambda: client.get("/health/ready").status_code == 503)
            refused = client.post("/infer/gated", json="late")
            assert refused.status_code == 503 and refused.json()["error"]["type"] == "Draining"
            assert int(refused.headers["retry-after"]) >= 1
        pipes.open()
        pipes.wait_until_begun()
        pipes.open()
        assert running.result().json() == "running"
        assert waiting.result().json() == "waiting"
        assert served.wait() == 0


def test_draining_under_load_fails_no_request(pipes: Pipes) -> None:
    answers: list[int] = []

    def ask_until_refused(url: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while (code := client.post("/infer/square", json=3).status_code) == 200:
                answers.append(code)
            answers.append(code)

    with Served(target("Square"), "--config", pipes.config) as served:
        served.until_ready()
        holding = asking(served, 3)  # while it runs, the server drains
        pipes.wait_until_begun()
        load = [threading.Thread(target=ask_until_refused, args=(served.url,)) for _ in range(8)]
        for thread in load:
            thread.start()
        until(lambda: len(answers) >= 100)
        served.signal(signal.SIGTERM)
        for thread in load:
            thread.join()
        pipes.open()
        assert holding.result().status_code == 200
        assert served.wait() == 0
    assert set(answers) == {200, 503} and answers.count(503) <= len(load)


def test_signals_for_others_and_what_a_service_manager_sends_to_all(pipes: Pipes) -> None:
    with Served(target("Gated"), *pipes.flags) as served:
        served.until_ready()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            served.signal(number)
            served.until_logged(f"signal ignored.*{number.name}")
        assert httpx.get(f"{served.url}/health/ready").status_code == 200
        running = asking(served, "running")
        pipes.wait_until_begun()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):  # SendSIGHUP=yes of systemd
            for process in [*served.children(), psutil.Process(served.process.pid)]:
                process.send_signal(number)
        until(lambda: httpx.get(f"{served.url}/health/ready").status_code == 503)
        pipes.open()
        assert running.result().json() == "running"
        assert served.wait() == 0


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_ends_it_unless_it_was_ignored_before(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # a program inherits that
    served = Served(target("Square"))
    signal.signal(signal.SIGHUP, before)
    with served:
        served.until_ready()
        served.signal(signal.SIGHUP)
        if ignored:
            assert httpx.get(f"{served.url}/health/ready").status_code == 200
            served.signal(signal.SIGTERM)
        assert served.wait() == 0


def test_a_worker_that_hangs_does_not_keep_the_server(pipes: Pipes) -> None:
    with Served(target("Gated"), *pipes.flags, "--drain-timeout", "0.1") as served:
        served.until_ready()
        running = asking(served, 3)
        pipes.wait_until_begun()
        (worker,) = served.children()
        worker.suspend()
        served.signal(signal.SIGTERM)
        assert running.result().status_code == 503
        served.until_logged("unfinished after drain_timeout.*running_rows=1")
        assert served.wait() == 0
        assert not worker.is_running()


def test_a_second_signal_ends_at_once(pipes: Pipes) -> None:
    with Served(target("Gated"), *pipes.flags) as served:
        served.until_ready()
        with connected(served) as connection:
            connection.sendall(b"POST /infer/gated HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n3")
            pipes.wait_until_begun()
            workers = served.children()
            served.signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{served.url}/health/ready").status_code == 503)
            served.signal(signal.SIGTERM)
            assert served.wait() == 128 + signal.SIGTERM
            assert connection.recv(1) == b""
        assert workers and not still_running(workers)


def test_a_command_whose_library_is_not_installed_says_what_to_install(tmp_path: Path) -> None:
    # A module of this name that is None cannot be imported, as if it were not installed.
    code = "import sys; sys.modules['orjson'] = None; sys.argv = ['weir', 'embed', 'serve', '.']; from weir.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    missing = "weir: orjson is not installed; add Weir's extra 'embed': pip install 'weir-serving[embed]'\n"
    assert (done.returncode, done.stderr) == (2, missing)


def test_an_interrupt_while_it_is_imported_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "weir"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (130, "")


def test_the_version_and_the_help() -> None:
    assert re.fullmatch(r"weir \d+\.\d+\.\d+\S*\n", weir("--version").stdout)
    assert "serve" in weir_here().stdout and "<bool>" not in weir_here("-h").stdout
    batch = weir_here("batch")
    assert (batch.returncode, batch.stderr) == (2, "") and "run" in batch.stdout
    shown = weir_here("serve", "-h", env={"COLUMNS": "300"}).stdout
    assert "(default: 64). Example: --max-batch-size 32" in shown
    assert "WEIR_MAX_BATCH_SIZE" in shown and "--help=all shows every option" in shown
