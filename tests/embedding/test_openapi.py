"""The description of the doors of texts."""

from openapi_spec_validator import validate
from tests.embedding.doors import routes_of

from weir.catalog.registry import Registry
from weir.embedding.bert_as_service.http import bert_paths
from weir.embedding.calling import EmbeddingContext, Models
from weir.embedding.metrics import TextCounts
from weir.embedding.openai import openai_paths
from weir.frontends.http.openapi import openapi
from weir.protocols.settings import HttpSettings


def test_every_route_is_described_and_no_other() -> None:
    routes = routes_of(EmbeddingContext(Models({}), HttpSettings(), 1, TextCounts()), lambda: None)
    refused = "/v1/{path}"  # of whatever is none of the others
    assert {getattr(route, "path", "").replace(":path", "") for route in routes} == {
        refused,
        *{**openai_paths(), **bert_paths()},
    }


def test_the_description_is_valid() -> None:
    validate(openapi(Registry([]), {}, more={**openai_paths(), **bert_paths()}))
