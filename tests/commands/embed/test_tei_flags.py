"""The flags of text-embeddings-router, each for what it is called here."""

from typing import Any

import pytest
from tests.embedding import tiny
from tests.served import Served, weir_here

from weir.embedding.bert_as_service.settings import translated
from weir.embedding.server_settings import TEI_ELSEWHERE, TEI_FLAGS, TEI_SWITCHES, TEXTS, from_tei
from weir.errors import SettingsError
from weir.settings import declared_settings, value_of

TABLE: list[tuple[str, object, str, object]] = [
    ("default_prompt", "query: ", "prompt", "query: "),
    ("default_prompt_name", "query", "prompt", "query"),
    ("max_concurrent_requests", "512", "max_queue_size", 512),
    ("max_batch_tokens", "16384", "max_batch_cost", 16384),
    ("max_batch_requests", "8", "max_batch_size", 8),
    ("max_client_batch_size", "32", "max_texts", 32),
    ("hostname", "0.0.0.0", "host", "0.0.0.0"),
    ("payload_limit", "2000000", "max_body_size", 2_000_000),
    ("otlp_service_name", "texts", "server_name", "texts"),
    ("cors_allow_origin", "*", "cors_origins", ["*"]),
    ("auto_truncate", True, "truncate", True),
    ("json_output", True, "log_format", "json"),
    ("pooling", "last-token", "pooling", "sep"),
    ("pooling", "splade", "pooling", "sparse"),
    ("pooling", "mean", "pooling", "mean"),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "value", "setting", "meant"), TABLE)
def test_a_flag_sets_what_it_set(flag: str, value: Any, setting: str, meant: object) -> None:
    given = {flag: value if isinstance(value, bool) else [value], "model_id": ["BAAI/bge-small-en"], "port": None}
    stock = translated(*from_tei([], given))
    assert (stock.directories, list(stock.today), stock.stock) == (["BAAI/bge-small-en"], [setting], False)
    assert value_of(declared_settings(TEXTS)[setting], stock.today[setting]) == meant


def test_every_flag_is_tried() -> None:
    assert {flag for flag, *_ in TABLE} == {*TEI_FLAGS, *TEI_SWITCHES, "pooling"}


def test_a_revision_belongs_to_one_id() -> None:
    found, _ = from_tei([], {"model_id": ["BAAI/bge-large-en-v1.5"], "revision": ["refs/pr/5"]})
    assert found == ["BAAI/bge-large-en-v1.5@refs/pr/5"]
    for models in ([], ["a/b", "c/d"], ["."]):
        with pytest.raises(SettingsError, match=r"^--revision=refs/pr/5: must be given once, with one id"):
            from_tei(models, {"revision": ["refs/pr/5"]})


def test_what_is_reached_in_another_way_says_so() -> None:
    for flag, remedy in TEI_ELSEWHERE.items():
        refused = weir_here("embed", "serve", f"--{flag.replace('_', '-')}", "x")
        assert (refused.returncode, refused.stderr) == (
            2,
            f"weir: --{flag.replace('_', '-')}: is not taken here: {remedy}\n",
        )


def test_the_command_of_tei_serves(tmp_path: Any) -> None:
    import httpx

    model = tiny.sentence_model(tmp_path / "bge-large-en-v1.5")
    flags = (
        "--model-id",
        model,
        "--max-batch-tokens",
        4096,
        "--max-client-batch-size",
        2,
        "--auto-truncate",
    )
    environment = {"WEIR_CACHE": str(tmp_path / "cache"), "WEIR_EXECUTOR": "thread"}
    with Served(*flags, command="embed serve", env=environment) as served:
        served.until_listening().until_logged(r"\bready\b.*models=")
        info = httpx.get(f"{served.url}/info").json()
        assert (info["model_id"], info["max_client_batch_size"], info["max_batch_tokens"]) == (
            "bge-large-en-v1.5",
            2,
            4096,
        )
        refused = httpx.post(f"{served.url}/embed", json={"inputs": ["a", "b", "c"]})
        assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")
