"""OpenAI's Batch API with the stock client, on a real server that is killed in the middle; and `weir batch run`."""

import json
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.hosted import Square
from tests.late import openai
from tests.served import CLEAN, Served, start_weir, until, weir, weir_here
from tests.text_models import tiny

import weir as weir_package

MODELS = Path(__file__).with_name("models.py")
ENDS = ("completed", "failed", "cancelled", "expired")


class Kept:
    """A server of batch jobs that can be killed and started again with the same directory."""

    def __init__(
        self, tmp_path: Path, *more: object, command: str = "serve", env: dict[str, str] | None = None
    ) -> None:
        self.ran = tmp_path / "ran"
        self.ran.touch()
        self.held = self.ran.with_name("ran.held")  # while it exists, HELD is not answered
        self.directory = tmp_path / "jobs"
        own = () if command != "serve" else (f"{MODELS}:Logged", "--workers", 1)
        self._words = (*own, "--batch-dir", self.directory, *more)
        self._command, self._env = command, {"RAN": str(self.ran)} | (env or {})
        self.served: Served
        self.client: Any  # the types of the stock client know OpenAI's own paths only

    def __enter__(self) -> "Kept":
        self.served = Served(*self._words, command=self._command, env=self._env).until_listening()
        until(lambda: httpx.get(f"{self.served.url}/health/ready").status_code == 200)
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

    def begin(self, requests: list[dict[str, Any]], endpoint: str = "/infer/logged", window: str = "24h") -> str:
        file = self.upload(requests)
        return str(self.client.batches.create(input_file_id=file, endpoint=endpoint, completion_window=window).id)

    def completed(self, batch: str) -> int:
        return int(self.client.batches.retrieve(batch).request_counts.completed)

    def ended(self, batch: str) -> Any:
        return until(lambda: job if (job := self.client.batches.retrieve(batch)).status in ENDS else None)


def squares(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [asked(f"r{item}", "/infer/logged", item) for item in range(start, start + count)]


def asked(name: str, url: str, body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with Kept(tmp_path) as kept:
        yield kept


def test_a_job_with_the_stock_client(kept: Kept) -> None:
    client = kept.client
    file = kept.upload(squares(50))
    shown = client.files.retrieve(file)
    assert (shown.filename, shown.purpose, shown.status) == ("in.jsonl", "batch", "processed")
    window: dict[str, Any] = {"endpoint": "/infer/logged", "completion_window": "24h", "metadata": {"by": "test"}}
    made = client.batches.create(input_file_id=file, **window)
    assert (made.object, made.status, made.metadata) == ("batch", "validating", {"by": "test"})
    job = kept.ended(made.id)
    counts = job.request_counts
    assert (job.status, counts.total, counts.completed, counts.failed) == ("completed", 50, 49, 1)
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
    assert 'weir_bulk_rows_total{model="logged"} 50.0' in httpx.get(f"{kept.served.url}/metrics").text


def test_killed_twice_it_loses_nothing_and_repeats_only_what_ran(tmp_path: Path) -> None:
    count = 600
    with Kept(tmp_path) as kept:
        batch = kept.begin(squares(count, 100))
        until(lambda: kept.completed(batch) > 50)
    with kept:
        assert kept.completed(batch) >= 50
        stored = until(lambda: done if (done := kept.completed(batch)) > 200 else 0)
    with kept:
        assert kept.completed(batch) >= stored
        lines = kept.lines(kept.ended(batch).output_file_id)
    assert [line["custom_id"] for line in lines] == [f"r{item}" for item in range(100, 100 + count)]
    assert [line["response"]["body"] for line in lines] == [item**2 for item in range(100, 100 + count)]
    runs = Counter(kept.ran.read_text().split())
    assert len(runs) == count
    assert sum(runs.values()) - count <= 2 * 128  # what was under way at a kill has no answer, and runs again


def test_cancelled_and_wrong_jobs(kept: Kept) -> None:
    client = kept.client
    kept.held.touch()
    running = kept.begin(squares(3000, 100), window="1d")
    until(lambda: kept.completed(running))
    assert client.batches.cancel(running).status in ("cancelling", "cancelled")
    kept.held.unlink()
    job = kept.ended(running)
    assert job.status == "cancelled"
    assert 0 < len(kept.lines(job.output_file_id)) < 3000

    job = kept.ended(kept.begin([*squares(2), *squares(1)]))
    assert (job.status, job.errors.data[0].code, job.errors.data[0].line) == ("failed", "duplicate_custom_id", 3)
    job = kept.ended(kept.begin(squares(2), "/infer/other"))
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
            client.batches.create(**fields)
        assert message in str(raised.value)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint="/infer/logged", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="purpose='evals': must be batch"):
        client.files.create(file=b"{}", purpose="evals")
    answer = httpx.get(f"{kept.served.url}/v1/files?limit=x")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
    assert httpx.put(f"{kept.served.url}/v1/files").status_code == 405
    assert httpx.get(f"{kept.served.url}/v1/files/..%2Fjobs.sqlite/content").status_code == 404
    for missing in ("files/file-none", "batches/batch_none"):
        error = httpx.get(f"{kept.served.url}/v1/{missing}").json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "id", None)  # as OpenAI does


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    with Kept(tmp_path, "--batch-max-file-size", 1000, "--batch-max-bytes", 1 << 20, "--api-key", "key") as kept:
        rule = r"must have at most 1000 bytes \(batch_max_file_size\)"
        with pytest.raises(openai.APIStatusError, match=rule) as raised:
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
        assert (
            kept.ended(kept.begin(squares(3))).status == "completed"
        )  # the server's own calls need no key of a caller
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
    source, out, ran, held = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "ran", "ran.held"))
    source.write_text("\n".join(map(json.dumps, squares(count))))
    ran.touch()
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


def test_what_batch_run_cannot_do_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("text,other\none,1\ntwo,2\n")
    parquet = tmp_path / "in.parquet"
    parquet.write_bytes(b"PAR1")
    remedy = f"weir: {parquet}: needs pyarrow; add Weir's extra 'parquet': pip install 'weir-serving[parquet]'\n"
    for file, more, message in (
        (source, ["--url", "/infer/logged", "--column", "nope"], "--column=nope: must be one of text, other"),
        (source, [], "a table needs --url"),
        (source, ["--url", "/metrics"], "must be a path of inference"),
        (parquet, ["--url", "/infer/logged"], remedy if find_spec("pyarrow") is None else "is not a parquet file"),
    ):
        refused = weir_here("batch", "run", file, f"{MODELS}:Logged", "-o", out, *more)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1) and message in refused.stderr, refused.stderr
    assert not Path(f"{out}.weir-batch").exists()


def test_rankings_of_a_job_and_embeddings_of_a_table_and_of_a_job(tmp_path: Path) -> None:
    directory, ranker = tiny.sentence_model(tmp_path / "tiny", "bert"), tiny.model(tmp_path / "ranker", labels=1)
    source, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    texts, documents = [f"word {number}" for number in range(30)], ["do it", "then do it right", "a bird"]
    source.write_text("\n".join(["text,other", *(f"{text},{place}" for place, text in enumerate(texts))]))
    env = {"WEIR_CACHE": str(tmp_path / "cache"), "WEIR_CALIBRATE": "false", "WEIR_WORKERS": "1"}
    done = weir("batch", "run", source, directory, "-o", out, "--url", "/v1/embeddings", "--model", "tiny", env=env)
    assert (done.returncode, done.stdout.strip()) == (0, f"30 responses: {out}"), done.stderr
    table = [vector_of(json.loads(line)["response"]["body"]) for line in out.read_text().splitlines()]
    with Kept(tmp_path, directory, ranker, command="embed serve", env=env) as kept:
        jobs: dict[str, list[dict[str, Any]]] = {
            "/v1/embeddings": [{"model": "tiny", "input": text} for text in texts],
            "/v2/rerank": [{"query": text, "documents": documents} for text in texts[:4]],
            "/rerank": [{"query": text, "texts": documents} for text in texts[:4]],
        }
        for path, bodies in jobs.items():
            job = kept.ended(kept.begin([asked(str(each), path, body) for each, body in enumerate(bodies)], path))
            answers = [line["response"]["body"] for line in kept.lines(job.output_file_id)]
            numbers = vector_of if path == "/v1/embeddings" else _scores
            for answer, body in zip(answers, bodies, strict=True):  # as to the same request alone
                alone = numbers(httpx.post(f"{kept.served.url}{path}", json=body).json())
                assert numbers(answer) == pytest.approx(alone, abs=1e-5)
            if path == "/v1/embeddings":
                np.testing.assert_allclose([vector_of(answer) for answer in answers], table, atol=1e-5)


def vector_of(answer: Any) -> Any:
    return answer["data"][0]["embedding"]


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
