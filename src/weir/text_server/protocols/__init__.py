"""The protocols of texts, each of which reads a request and writes its response in one API's form; and the list of those APIs, all but bert-as-service's."""

from weir.text_server.exchange import EmbeddingContext
from weir.text_server.http import TextApi
from weir.text_server.protocols.cohere import cohere_api
from weir.text_server.protocols.infinity import infinity_api
from weir.text_server.protocols.openai import OpenAI
from weir.text_server.protocols.tei import Tei


def text_apis(context: EmbeddingContext) -> list[TextApi]:
    """Return the APIs for vectors, scores and labels, in the order of their routes: OpenAI's takes every other path below /v1."""
    return [infinity_api(context), cohere_api(context), Tei(context), OpenAI(context)]
