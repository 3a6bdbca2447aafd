"""The frontend of bert-as-service over HTTP: JSON, msgpack and forms. The status has the fields of bert-as-service's, of their types: its clients and dashboards
look for them."""

from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs

import httpx
import msgspec
import numpy as np
import pytest
from tests.described import answer_faults, body_faults
from tests.rings import subcases
from tests.text_models import tiny
from tests.text_models.opening import SETTINGS
from tests.text_server.hashing import HashingEncoder, vector_of, words_of
from tests.text_server.served_texts import Standing, described, post, served

import weir.embedding
from weir.errors import Overloaded
from weir.protocols.account import Account
from weir.text_server.bert_as_service import http as bert_http
from weir.text_server.texts import TextOptions

TEXTS = ["first do it", "then do it right"]
EXPECTED = [vector_of(text).tolist() for text in TEXTS]
DESCRIBED = described()
FORM = "application/x-www-form-urlencoded"


@subcases("identity", [123, "abc", None])
def test_json_is_answered_with_id_result_and_status(identity: Any, plain: Standing) -> None:
    answer = plain.post("/encode", {"id": identity, "texts": TEXTS, "is_tokenized": False})
    assert answer.json() == {"id": identity, "result": EXPECTED, "status": 200}
    wrong = plain.post("/encode", {"id": identity, "texts": [3]}).json()
    assert wrong.get("id") == identity


def test_forms(plain: Standing) -> None:
    answer = plain.post("/encode", data={"id": "7", "texts": TEXTS})  # each text once
    assert answer.json() == {"id": "7", "result": EXPECTED, "status": 200}
    words = plain.post("/encode", data={"id": "7", "texts": TEXTS, "is_tokenized": "true"})
    assert words.json()["result"] == EXPECTED
    assert plain.encoder.heard[-1].texts == [text.split() for text in TEXTS]
    assert plain.post("/encode", data={"id": "5", "texts": ""}).json()["id"] == "5"
    of_curl = {"content": b'{"id": 1, "texts": ["first do it"]}', "headers": {"content-type": FORM}}
    assert plain.post("/encode", **of_curl).json()["result"] == EXPECTED[:1]


@subcases(("said", "texts", "options"), [
    ({"texts": [["do", "it"], ["now"]], "is_tokenized": True}, [["do", "it"], ["now"]], {"whole_words": True}),
    ({"texts": [["do", "it"]]}, [["do", "it"]], {}),  # the server sees by itself that they are words
    ({"texts": [[101, 7, 102]]}, [[101, 7, 102]], {}),
    ({"texts": [["do it", "now"]], "pairs": True}, [("do it", "now")], {}),
    ({"texts": [["do", "it"]], "is_tokenized": True, "prompt": "query"}, [["do", "it"]], {"whole_words": True, "prompt": "query"}),
])  # fmt: skip
def test_texts_may_be_words_token_ids_or_pairs(said: Any, texts: Any, options: Any, plain: Standing) -> None:
    answer = plain.post("/encode", {"id": 1, **said})
    assert (plain.encoder.heard[-1].texts, plain.encoder.heard[-1].query.options) == (texts, TextOptions(**options))
    assert answer.json()["result"] == [vector_of(" ".join(words_of(text))).tolist() for text in texts]


def test_msgpack_carries_the_bytes_of_the_array(plain: Standing) -> None:
    body = msgspec.msgpack.encode({"id": 1, "texts": TEXTS, "dimensions": 4, "show_tokens": True})
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    said = msgspec.msgpack.decode(plain.post("/encode", content=body, headers=headers).content)
    assert (said["id"], said["status"], said["shape"]) == (1, 200, [2, 4])
    assert said["tokens"] == [text.split() for text in TEXTS]
    np.testing.assert_array_equal(np.frombuffer(said["result"], "<f4").reshape(2, 4), np.array(EXPECTED)[:, :4])


def test_each_token_may_have_its_vector_and_a_text_that_was_cut_is_named(plain: Standing) -> None:
    answer = post("/encode", {"id": 1, "texts": TEXTS}, HashingEncoder(per_token=True))
    assert np.array(answer.json()["result"]).shape == (2, 4, 8)
    answer = plain.post("/encode", {"id": 1, "texts": ["short", "one two three four five six seven"]})
    assert answer.json()["truncated"] == [1] and answer.headers["x-weir-truncated"] == "1"


WRONG: list[tuple[Any, str]] = [
    ({"id": 1}, "texts: is missing"),
    ({"texts": "one"}, "texts='one': must be a list"),
    ({"texts": []}, "texts: has 0 texts"),
    ({"texts": ["a", ["b", 3]]}, "texts[1]: must be a text, a list of words, or a list of token ids"),
    ({"texts": [["b"], []]}, "texts[1]: must not be empty"),
    ({"texts": ["a b"], "is_tokenized": True}, "texts[0]: must be a list of words (is_tokenized)"),
    ({"texts": [[1]], "is_tokenized": True}, "texts[0]: must be"),
    ({"texts": [["a", "b", "c"]], "pairs": True}, "texts[0]: must be two texts (pairs)"),
    ({"texts": ["a"], "dimensions": "3"}, "dimensions='3': must be an integer or null"),
    ({"texts": ["a"], "colour": 3}, "colour: unknown field; available: texts, id"),
    ([1], "body: must be an object"),
]  # fmt: skip


@subcases(("said", "rule"), WRONG)
def test_what_is_wrong_is_named(said: Any, rule: str, plain: Standing) -> None:
    answer = plain.post("/encode", said)
    document = answer.json()
    assert (answer.status_code, document["status"], document["type"]) == (400, 400, "InvalidRequest")
    assert rule in document["description"]


@subcases(("body", "rule"), WRONG)
def test_the_description_refuses_what_the_server_refuses(body: Any, rule: str) -> None:
    # What a text may be depends on other fields, and some limits on the server: these it does not describe.
    beyond = ("(is_tokenized)", "texts[0]: must be", "(pairs)", "(max_texts)", "1 to 8")
    assert bool(body_faults(DESCRIBED, "/encode", body)) != rule.endswith(beyond)


@pytest.mark.parametrize("body", [
    {"id": 1, "texts": ["one two three four five six seven"], "show_tokens": True}, {"texts": [[3, 4], ["a"], "b"], "model": None},
    {"texts": [["a", "b"]], "pairs": True}, {"id": {"a": 1}, "texts": [3]},
])  # fmt: skip
async def test_answers_are_as_described(body: Any) -> None:
    async with served(HashingEncoder()) as server:
        answers = {"/encode": await server.client.post("/encode", json=body)}
        for path in ("/status/server", "/status/client"):
            answers[path] = await server.client.get(path)
        answers["/terminate"] = await server.client.post("/terminate")
    for path, answer in answers.items():
        assert answer_faults(DESCRIBED, path, answer) == [], answer.text
    assert bool(body_faults(DESCRIBED, "/encode", body)) == (answers["/encode"].status_code == 400)


@subcases(("sent", "status", "rule"), [
    ({"content": b"\xff", "headers": {"content-type": "application/msgpack"}}, 400, "body:"),
    ({"content": b"\x91" * 100_000, "headers": {"content-type": "application/msgpack"}}, 400, "body: is not msgpack"),
    ({"content": b"a;b", "headers": {"content-type": FORM}}, 400, "body: is not a form"),
    ({"data": {"texts": "a", "is_tokenized": "perhaps"}}, 400, "is_tokenized='perhaps': must be true or false"),
    ({"content": b"a", "headers": {"content-type": "text/csv"}}, 415, "Content-Type 'text/csv'"),
    ({"json": {"texts": ["a"]}, "headers": {"accept": "text/csv"}}, 415, "Accept 'text/csv'"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(sent: Any, status: int, rule: str, plain: Standing) -> None:
    answer = plain.post("/encode", **sent)
    assert answer.status_code == answer.json()["status"] == status
    assert rule in answer.json()["description"]


def test_an_error_of_the_line_keeps_the_id() -> None:
    encoder = HashingEncoder()
    encoder.error = Overloaded("the line is full", retry_after=0.25)
    answer = post("/encode", {"id": 5, "texts": TEXTS}, encoder)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.json() == {
        "id": 5, "type": "Overloaded", "description": "the line is full", "status": 429, "details": {"retry_after": 0.25},
    }  # fmt: skip


@subcases(("body", "place"), [
    (rb'{"texts": ["a", "' + rb"\ud800" * 10_001 + b'"]}', "body: is not valid Unicode: byte 17 begins half"),
    (rb'{"texts": ["\ud83d\ude00"]', "body: is not JSON"),
])  # fmt: skip
def test_a_body_with_more_halves_of_characters_is_refused(body: bytes, place: str, plain: Standing) -> None:
    answer = plain.post("/encode", content=body, headers={"x-request-id": "r1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "r1")
    assert answer.json()["description"].startswith(place)


@subcases(("body", "texts"), [
    (rb'{"texts": ["first\u0000 do", "it\ud800", "\u0000", "\udc00"]}', ["first do", "it", " ", " "]),
    (rb'{"texts": [["a", "b\ud800"], ["\u0000", "\ud83d\ude00"]]}', [["a", "\ufffd"], ["\ufffd", "\U0001f600"]]),
    (rb'{"texts": [["a\u0000", "b\ud800"]], "pairs": true}', [("a", "b")]),
])  # fmt: skip
def test_what_is_no_character_is_left_out_of_a_text_as_there(body: bytes, texts: Any, plain: Standing) -> None:
    assert plain.post("/encode", content=body).status_code == 200
    assert plain.encoder.heard[-1].texts == texts


async def test_pages_of_other_origins_may_ask() -> None:
    async with served(HashingEncoder(), cors_origins=["*"]) as server:
        said: dict[str, Any] = {"json": {"texts": ["a"]}, "headers": {"origin": "http://elsewhere"}}
        assert (await server.client.post("/encode", **said)).headers["access-control-allow-origin"] == "*"


async def test_the_state_is_shown_and_who_may_control_the_server_may_end_it() -> None:
    async with served(HashingEncoder()) as server:
        await server.client.post("/encode", json={"texts": TEXTS}, headers={"x-client-id": "me"})
        await server.client.post("/v1/embeddings", json={"input": TEXTS})
        state = (await server.client.get("/status/server")).json()
        client = (await server.client.get("/status/client", headers={"x-client-id": "me"})).json()
        from_elsewhere = await server.client.post("/terminate", headers={"x-forwarded-for": "10.0.0.1"})
        assert from_elsewhere.status_code == 403 and not server.ended.is_set()
        assert (await server.client.post("/terminate")).json()["status"] == 200
        await server.ended.wait()
    assert (state["server_version"], state["max_seq_len"], state["client"]) == ("1.10.0", 6, "127.0.0.1")
    assert state["models"]["hashing"] == {"dimensions": 8, "max_seq_len": 6}
    assert state["statistic"]["num_total_seq"] == 4 and state["statistic"]["num_sys_request"] == 1
    assert (client["identity"], client["num_request"]) == ("me", 1)
    assert {row["identity"]: row["frontend"] for row in client["clients"]} == {"me": "encode", "127.0.0.1": "openai"}


@subcases("piece", [4, 5, 7, 1 << 16])
def test_forms_are_read_as_python_reads_them(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert_http, "_PIECE", piece)
    chance = Random(piece)
    pieces = ["a", "%41", "%", "%4", "%zz", "+", "\u00e9", "%C3%A9", "="]
    for _ in range(500):
        fields = ["".join(chance.choices(pieces, k=chance.randrange(9))) for _ in range(chance.randrange(1, 4))]
        form = "&".join(f"{field}={field}" for field in fields)
        assert bert_http._fields_of(form) == parse_qs(form, keep_blank_values=True, strict_parsing=True)
    with pytest.raises(ValueError, match="bad query field: 'no field'"):
        bert_http._fields_of("a=1&no field")


@pytest.mark.parametrize("kind", ["application/json", "application/msgpack", "application/x-msgpack; x=1"])
def test_the_values_of_a_long_body_are_charged_while_it_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    take = Account.take_values

    def taking(account: Account, size_bytes: int, body_bytes: int) -> int:
        charged.append(size_bytes)
        return take(account, size_bytes, body_bytes)

    monkeypatch.setattr(Account, "take_values", taking)
    encode = msgspec.json.encode if "json" in kind else msgspec.msgpack.encode
    body = encode({"id": 1, "texts": ["ab"] * 20_000})
    post("/encode", None, content=body, headers={"content-type": kind})
    assert max(charged) > 20_000 * 40


# Of each field its type there, where it is always set.
FIELDS: dict[type, str] = {
    str: """client server_version python_version server_start_time server_current_time model_dir ckpt_name config_name graph_tmp_dir cors
        pyzmq_version zmq_version""",
    int: """status max_seq_len pooling_strategy port port_in port_out http_port http_max_connect num_worker num_process
        num_concurrent_socket max_batch_size priority_batch_size prefetch_size""",
    bool: """cased_tokenization mask_cls_sep no_special_token no_position_embeddings fixed_embed_length show_tokens_to_client cpu fp16 xla
        verbose""",
    float: "gpu_memory_fraction",
    list: "pooling_layer device_map tensorflow_version",
    dict: "statistic",
}  # fmt: skip


def of_wrong_types(state: dict[str, Any]) -> list[str]:
    return [name for kind, names in FIELDS.items() for name in names.split() if type(state[name]) is not kind]


def test_every_field_has_a_value_of_its_type_when_fresh_and_when_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with (
        weir.embedding.serve(tiny.model(tmp_path / "model"), zmq_port=0, cache=str(cache), **SETTINGS) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        fresh = http.get("/status/server").json()
        for _ in range(3):
            http.post("/encode", json={"texts": ["it", "do it"]})
        used = http.get("/status/server").json()
        ports = server.zmq_ports
    assert of_wrong_types(fresh) == of_wrong_types(used) == []
    assert [name for name, value in used.items() if value is None] == ["tuned_model_dir"]
    assert None not in used["statistic"].values() and used["statistic"]["avg_size_per_request"] == 2
    assert (used["port"], used["port_out"]) == (used["port_in"], used["port_out"]) == ports
    assert (used["ckpt_name"], used["graph_tmp_dir"]) == ("model.safetensors", str(cache))
    assert used["gpu_memory_fraction"] == 1.0


def test_fields_are_what_was_declared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "weir")
    said: dict[str, Any] = {"cased": True, "gpu_memory_fraction": 0.5, "pooling": "mean-sqrt"}
    with weir.embedding.serve(
        tiny.model(tmp_path / "model"), cache=str(tmp_path / "cache"), **SETTINGS, **said
    ) as server:
        state = httpx.get(f"{server.url}/status/server").json()
    expected: dict[str, Any] = {
        "cased_tokenization": True,
        "gpu_memory_fraction": 0.5,
        "verbose": True,
    }  # as the program's logging is
    expected |= dict.fromkeys(("pooling_strategy", "port", "port_in", "port_out"))
    assert {name: state[name] for name in expected} == expected
