"""OpenAI's Batch API with the stock client, on a real server that is killed in the middle; and `weir batch run`."""

import json
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.hosted import Square
from tests.late import openai
from tests.served import CLEAN, Served, start_weir, weir, weir_here
from tests.text_models import tiny

import weir as weir_package

MODELS = Path(__file__).with_name("models.py")
PATIENCE = 60.0  # seconds


def until(condition: Callable[[], Any]) -> Any:
    """Return what `condition` returns once it is true."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


class Kept:
    """A server of batch jobs that can be killed and started again with the same directory."""

    def __init__(self, tmp_path: Path, *more: object) -> None:
        self.ran = tmp_path / "ran"
        self.ran.touch()
        self.held = self.ran.with_name("ran.held")  # while it exists, HELD is not answered
        self.directory = tmp_path / "jobs"
        self._more = more
        self.served: Served
        self.client: Any  # the types of the stock client know OpenAI's own paths only

    def __enter__(self) -> "Kept":
        self.served = Served(
            f"{MODELS}:Logged", "--workers", 1, "--batch-dir", self.directory, *self._more, env={"RAN": str(self.ran)}
        ).until_ready()
        self.client = openai.OpenAI(base_url=f"{self.served.url}/v1", api_key="key", max_retries=0)
        return self

    def __exit__(self, *raised: Any) -> None:
        self.client.close()
        self.served.__exit__(*raised)  # kills it

    def upload(self, requests: list[dict[str, Any]]) -> str:
        lines = "\n".join(map(json.dumps, requests))
        return str(self.client.files.create(file=("../in.jsonl", lines.encode()), purpose="batch").id)

    def lines(self, file: str | None) -> list[dict[str, Any]]:
        assert file is not None
        return [json.loads(line) for line in self.client.files.content(file).text.splitlines()]

    def ended(self, batch: str) -> Any:
        def status() -> Any:
            job = self.client.batches.retrieve(batch)
            return job if job.status in ("completed", "failed", "cancelled", "expired") else None

        return until(status)


def squares(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"r{item}", "method": "POST", "url": "/infer/logged", "body": item}
        for item in range(start, start + count)
    ]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with Kept(tmp_path) as kept:
        yield kept


def test_a_job_with_the_stock_client(kept: Kept) -> None:
    client = kept.client
    file = kept.upload(squares(50))
    shown = client.files.retrieve(file)
    assert (shown.filename, shown.purpose, shown.status) == ("in.jsonl", "batch", "processed")
    made = client.batches.create(
        input_file_id=file,
        endpoint="/infer/logged",
        completion_window="24h",
        metadata={"by": "test"},
    )
    assert (made.object, made.status, made.metadata) == ("batch", "validating", {"by": "test"})
    job = kept.ended(made.id)
    assert (job.status, job.request_counts.total, job.request_counts.completed, job.request_counts.failed) == (
        "completed",
        50,
        49,
        1,
    )
    good = kept.lines(job.output_file_id)
    assert [line["custom_id"] for line in good] == [f"r{item}" for item in range(50) if item != 13]
    assert all(line["response"]["body"] == int(line["custom_id"][1:]) ** 2 and line["error"] is None for line in good)
    (bad,) = kept.lines(job.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("r13", 500)
    assert [each.id for each in client.batches.list()] == [made.id]
    assert {each.id for each in client.files.list()} == {file, job.output_file_id, job.error_file_id}
    assert client.files.delete(file).deleted
    with pytest.raises(openai.NotFoundError, match="unknown id"):
        client.files.retrieve(file)
    page = httpx.get(f"{kept.served.url}/metrics").text
    assert 'weir_bulk_rows_total{model="logged"} 50.0' in page


def test_killed_twice_it_loses_nothing_and_repeats_only_what_ran(tmp_path: Path) -> None:
    count = 600
    with Kept(tmp_path) as kept:
        batch = kept.client.batches.create(
            input_file_id=kept.upload(squares(count, 100)),
            endpoint="/infer/logged",
            completion_window="24h",
        ).id
        until(lambda: kept.client.batches.retrieve(batch).request_counts.completed > 50)
    stored = 0
    for least in (200, None):
        with kept:
            counts = kept.client.batches.retrieve(batch).request_counts
            assert counts is not None
            assert counts.completed >= max(stored, 50)
            if least is not None:
                stored = until(partial(_above, kept, batch, least))
                continue
            job = kept.ended(batch)
            lines = kept.lines(job.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"r{item}" for item in range(100, 100 + count)]
    assert [line["response"]["body"] for line in lines] == [item**2 for item in range(100, 100 + count)]
    runs = Counter(kept.ran.read_text().split())
    assert len(runs) == count
    assert sum(runs.values()) - count <= 2 * 128  # what was under way at a kill has no answer, and runs again


def _above(kept: Kept, batch: str, least: int) -> int:
    completed: int = kept.client.batches.retrieve(batch).request_counts.completed
    return completed if completed > least else 0


def test_cancelled_and_wrong_jobs(kept: Kept) -> None:
    client = kept.client
    create = client.batches.create
    kept.held.touch()
    running = create(input_file_id=kept.upload(squares(3000, 100)), endpoint="/infer/logged", completion_window="1d")
    until(lambda: client.batches.retrieve(running.id).request_counts.completed)
    assert client.batches.cancel(running.id).status in ("cancelling", "cancelled")
    kept.held.unlink()
    job = kept.ended(running.id)
    assert job.status == "cancelled"
    assert 0 < len(kept.lines(job.output_file_id)) < 3000

    twice = [*squares(2), *squares(1)]
    job = kept.ended(create(input_file_id=kept.upload(twice), endpoint="/infer/logged", completion_window="24h").id)
    assert (job.status, job.errors.data[0].code, job.errors.data[0].line) == ("failed", "duplicate_custom_id", 3)
    job = kept.ended(create(input_file_id=kept.upload(squares(2)), endpoint="/infer/other", completion_window="24h").id)
    assert [error.code for error in job.errors.data] == ["mismatched_url"] * 2

    file = kept.upload(squares(1))
    for wrong, message in (
        ({"endpoint": "/v2/repository/index"}, "must be a path of inference"),
        ({"completion_window": "soon"}, "completion_window='soon': must be minutes, hours or days"),
        ({"completion_window": "99d"}, "at most 30d"),
        ({"metadata": {"x": "y" * 600}}, "metadata: must have at most 16 keys"),
        ({"input_file_id": 3}, "body: Expected `str`, got `int`"),
    ):
        fields = {"input_file_id": file, "endpoint": "/infer/logged", "completion_window": "24h", **wrong}
        with pytest.raises(openai.BadRequestError) as raised:
            create(**fields)
        assert message in str(raised.value)
    with pytest.raises(openai.NotFoundError):
        create(input_file_id="file-none", endpoint="/infer/logged", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="purpose='evals': must be batch"):
        client.files.create(file=b"{}", purpose="evals")
    answer = httpx.get(f"{kept.served.url}/v1/files?limit=x")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
    assert httpx.put(f"{kept.served.url}/v1/files").status_code == 405
    assert httpx.get(f"{kept.served.url}/v1/files/..%2Fjobs.sqlite/content").status_code == 404
    for missing in ("files/file-none", "batches/batch_none"):
        error = httpx.get(f"{kept.served.url}/v1/{missing}").json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "id", None)  # as OpenAI does


def test_a_window_that_ends_leaves_the_rest_unrun(kept: Kept) -> None:
    many = kept.upload(squares(3000, 100))
    create = kept.client.batches.create
    kept.held.touch()
    made = create(input_file_id=many, endpoint="/infer/logged", completion_window="1m")
    until(lambda: kept.client.batches.retrieve(made.id).request_counts.completed)
    kept.__exit__(None, None, None)
    import sqlite3

    with sqlite3.connect(kept.directory / "jobs.sqlite") as database:  # a minute later
        database.execute("UPDATE jobs SET expires_at = ?", (int(time.time()),))
    database.close()
    kept.held.unlink()
    with kept:
        job = kept.ended(made.id)
        assert job.status == "expired"
        left = kept.lines(job.error_file_id)
        assert left[-1] == {
            "custom_id": "r3099", "response": None,
            "error": {"code": "batch_expired", "message": "This request could not be run before the completion window ended."},
        }  # fmt: skip
        assert 0 < job.request_counts.completed == 3000 - len(left)
    kept.__enter__()  # for the fixture


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    with Kept(tmp_path, "--batch-max-file-size", 1000, "--batch-max-bytes", 1 << 20, "--api-key", "key") as kept:
        with pytest.raises(
            openai.APIStatusError, match=r"must have at most 1000 bytes \(batch_max_file_size\)"
        ) as raised:
            kept.client.files.create(file=b"x" * 2000, purpose="batch")
        assert raised.value.status_code == 413
        host, port = kept.served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(
                b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\ncontent-type: multipart/form-data; boundary=b\r\n"
                b"content-length: 999999999\r\n\r\n"
            )
            assert sock.recv(100).startswith(b"HTTP/1.1 413")
        assert httpx.get(f"{kept.served.url}/v1/batches").status_code == 401
        file = kept.upload(squares(3))
        made = kept.client.batches.create(input_file_id=file, endpoint="/infer/logged", completion_window="24h")
        assert kept.ended(made.id).status == "completed"  # the server's own calls need no key of a caller
        assert list((kept.directory / "files").glob("*.part")) == []


def test_jobs_of_an_application_in_another_server(tmp_path: Path) -> None:
    """Each of the server's processes answers for the jobs; one of them runs them."""
    apps = [weir_package.asgi(Square, executor="inline", batch_dir=str(tmp_path), api_key="key") for _ in range(2)]
    with TestClient(apps[0]) as first, TestClient(apps[1]) as second:
        for client in (first, second):
            client.headers["authorization"] = "Bearer key"
        body = b'{"custom_id": "a", "url": "/infer/square", "body": 3}'
        file = second.post("/v1/files", files={"file": ("in.jsonl", body)}, data={"purpose": "batch"}).json()["id"]
        job = {"input_file_id": file, "endpoint": "/infer/square", "completion_window": "1h"}
        made = first.post("/v1/batches", json=job).json()["id"]
        until(lambda: second.get(f"/v1/batches/{made}").json()["status"] == "completed")
        output = first.get(f"/v1/batches/{made}").json()["output_file_id"]
        assert first.get(f"/v1/files/{output}/content").json()["response"]["body"] == 9
        shown = until(lambda: _with_counts(first.get("/dashboard/data").json(), {"completed": 1}))
        assert (shown["jobs"][0]["id"], shown["jobs"][0]["total"]) == (made, 1)
        assert first.get("/v1/batches", headers={"authorization": ""}).status_code == 401
        shutil.rmtree(tmp_path / "files")
        refused = first.post("/v1/files", files={"file": ("in.jsonl", body)}, data={"purpose": "batch"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "60"
        assert "batch_dir: the server cannot keep files and jobs there now (No such file" in refused.text
    with pytest.raises(weir_package.SettingsError, match="batch_max_jobs=0: must be 1 or more"):
        weir_package.asgi(Square, batch_max_jobs=0)


def _with_counts(data: Any, counts: dict[str, int]) -> Any:
    """Return what the dashboard shows of jobs, once it has these counts."""
    jobs = data["now"].get("jobs")
    return jobs if jobs and jobs["counts"] == counts else None


# Without a server.


def test_batch_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    count = 1200
    source, out, ran = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "ran"
    source.write_text("\n".join(map(json.dumps, squares(count))))
    ran.touch()
    held = tmp_path / "ran.held"
    held.touch()
    words = ["batch", "run", str(source), f"{MODELS}:Logged", "-o", str(out)]
    first = start_weir(words, {**CLEAN, "RAN": str(ran)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(ran.read_text().splitlines()) > 100)
    first.kill()
    first.wait()
    held.unlink()
    assert not out.exists()
    again = weir(*words, env={"RAN": str(ran)})
    assert again.returncode == 1, again.stderr
    assert f"{count - 1} responses: {out}, 1 failed: {tmp_path / 'out.errors.jsonl'}" in again.stdout
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{item}" for item in range(count) if item != 13]
    assert len(ran.read_text().splitlines()) <= count + 512 + 8
    assert not Path(f"{out}.weir-batch").exists()


def test_batch_run_reads_tables(tmp_path: Path) -> None:
    source, out, ran = tmp_path / "in.csv", tmp_path / "out.jsonl", tmp_path / "ran"
    source.write_text("text,other\none,1\ntwo,2\n")
    (tmp_path / "model.py").write_text(
        "import weir\n\nclass Upper(weir.Model):\n    def predict(self, batch):\n        return [text.upper() for text in batch]\n"
    )
    target = f"{tmp_path / 'model.py'}:Upper"
    done = weir("batch", "run", source, target, "-o", out, "--url", "/infer/upper", env={"RAN": str(ran)})
    assert (done.returncode, done.stdout.strip()) == (0, f"2 responses: {out}")
    assert [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()] == ["ONE", "TWO"]
    for more, message in (
        (["--url", "/infer/upper", "--column", "nope"], "--column=nope: must be one of text, other"),
        ([], "a table needs --url"),
        (["--url", "/metrics"], "must be a path of inference"),
    ):  # before any model is loaded
        refused = weir_here("batch", "run", source, target, "-o", out, *more)
        assert (refused.returncode, message in refused.stderr, refused.stderr.count("\n")) == (2, True, 1), (
            refused.stderr
        )
    assert not Path(f"{out}.weir-batch").exists()


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is there")
def test_parquet_without_pyarrow_is_refused_in_one_line(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    source.write_bytes(b"PAR1")
    refused = weir_here(
        "batch", "run", source, f"{MODELS}:Logged", "-o", tmp_path / "out.jsonl", "--url", "/infer/logged"
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert (
        refused.stderr
        == f"weir: {source}: needs pyarrow; add Weir's extra 'parquet': pip install 'weir-serving[parquet]'\n"
    )


def test_rankings_of_a_job_and_embeddings_of_a_table_and_of_a_job(tmp_path: Path) -> None:
    directory = tiny.sentence_model(tmp_path / "tiny", "bert")
    ranker = tiny.model(tmp_path / "ranker", labels=1)
    source, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("text\n" + "\n".join(f"word {number}" for number in range(30)))
    cache = {"WEIR_CACHE": str(tmp_path / "cache"), "WEIR_CALIBRATE": "false", "WEIR_WORKERS": "1"}
    done = weir("batch", "run", source, directory, "-o", out, "--url", "/v1/embeddings", "--model", "tiny", env=cache)
    assert (done.returncode, done.stdout.strip()) == (0, f"30 responses: {out}"), done.stderr
    first = json.loads(out.read_text().splitlines()[0])["response"]["body"]["data"][0]["embedding"]
    with Served(directory, ranker, "--batch-dir", tmp_path / "jobs", env=cache, command="embed serve") as served:
        served.until_listening()
        until(lambda: httpx.get(f"{served.url}/health/ready").status_code == 200)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="key") as client:
            lines = [
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/embeddings",
                    "body": {"model": "tiny", "input": f"word {number}"},
                }
                for number in range(30)
            ]
            file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
            made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
            until(lambda: client.batches.retrieve(made.id).status == "completed")
            text = client.files.content(client.batches.retrieve(made.id).output_file_id or "").text
            vector = json.loads(text.splitlines()[0])["response"]["body"]["data"][0]["embedding"]
            alone = client.embeddings.create(model="tiny", input="word 0").data[0].embedding
            _ranked_by_jobs(served.url, client)
    assert vector == pytest.approx(first, abs=1e-6)
    assert alone == pytest.approx(first, abs=1e-6)


def _ranked_by_jobs(url: str, client: "openai.OpenAI") -> None:
    """Rank by one job in Cohere's form, and one in TEI's: each answer is that to the same request alone."""
    documents = ["do it", "then do it right", "a bird"]
    for path, field in (("/v2/rerank", "documents"), ("/rerank", "texts")):
        bodies = [{"query": f"question {number}", field: documents} for number in range(4)]
        lines = [
            {"custom_id": str(number), "method": "POST", "url": path, "body": body}
            for number, body in enumerate(bodies)
        ]
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        create: Any = client.batches.create  # its types know OpenAI's own paths only
        made = create(input_file_id=file.id, endpoint=path, completion_window="24h")
        until(partial(_is_done, client, made.id))
        text = client.files.content(client.batches.retrieve(made.id).output_file_id or "").text
        for line, body in zip(text.splitlines(), bodies, strict=True):
            alone = httpx.post(f"{url}{path}", json=body).json()
            assert _scores(json.loads(line)["response"]["body"]) == pytest.approx(_scores(alone), abs=1e-5)


def _is_done(client: "openai.OpenAI", batch: str) -> bool:
    return client.batches.retrieve(batch).status == "completed"


def _scores(answer: Any) -> dict[int, float]:
    """Return the score of each document by its index."""
    ranks = answer if isinstance(answer, list) else answer["results"]
    return {rank["index"]: rank.get("score", rank.get("relevance_score")) for rank in ranks}


def test_a_server_that_has_stopped_refuses_jobs_with_503(tmp_path: Path) -> None:
    client = TestClient(weir_package.asgi(Square, batch_dir=str(tmp_path)))
    with client:
        assert client.get("/v1/files").status_code == 200
    refused = client.get("/v1/batches")
    assert (refused.status_code, "starting or shutting down" in refused.text) == (503, True)
