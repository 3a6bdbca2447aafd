"""TEI's endpoints over encoders without a model: what is asked, what is answered, its headers and errors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.rings import subcases
from tests.text_server.hashing import HashingEncoder, labeller, ranker, vector_of, weigher
from tests.text_server.served_texts import MAX_TEXTS, Standing, asked, post, served

from weir.text_models.packing import unit_vectors
from weir.text_server.texts import TextFacts, TextTask

TEXTS = ["first do it", "then do it right", "then do it better"]
UNIT = unit_vectors(np.stack([vector_of(text) for text in TEXTS]))
HEADERS = {
    "x-compute-type": "cpu", "x-compute-time": "7", "x-compute-characters": "44", "x-compute-tokens": "11",
    "x-total-time": "7", "x-tokenization-time": "1", "x-queue-time": "2", "x-inference-time": "3",
}  # fmt: skip


@pytest.fixture(scope="module")
def ranking() -> Iterator[Standing]:
    with Standing(HashingEncoder(), ranker()) as server:
        yield server


@pytest.fixture(scope="module")
def labelling() -> Iterator[Standing]:
    with Standing(labeller()) as server:
        yield server


@subcases("path", ["/embed", "/", "/invocations"])
def test_vectors_have_length_one_and_the_headers_tell_the_work(path: str, plain: Standing) -> None:
    answer = plain.post(path, {"inputs": TEXTS, "parameters": {}, "options": {"wait_for_model": True}})
    np.testing.assert_allclose(answer.json(), UNIT, rtol=1e-6)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_inputs_are_texts_or_token_ids(plain: Standing) -> None:
    same: list[list[Any]] = [[[4], [5, 6]], ["a", "b"]]
    inputs: list[tuple[Any, list[Any]]] = [("one", ["one"]), ([4, 5], [[4, 5]]), *zip(same, same, strict=True)]
    for given, texts in inputs:
        answer = plain.post("/embed", {"inputs": given, "normalize": False})
        assert plain.encoder.heard[-1].texts == texts and len(answer.json()) == len(texts)


def test_each_token_may_have_a_vector() -> None:
    encoders = HashingEncoder(), HashingEncoder("tokens", per_token=True)
    answer = post("/embed_all", {"inputs": ["one two", "three"]}, *encoders)
    assert [len(each) for each in answer.json()] == [2, 1]


def test_a_sentence_is_compared_with_others_by_the_function_of_the_model() -> None:
    said = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}, "parameters": {"truncate": True}}
    np.testing.assert_allclose(post("/similarity", said).json(), UNIT[1:] @ UNIT[0], rtol=1e-5)
    encoder = HashingEncoder(facts=TextFacts(similarity="euclidean"))
    vectors = np.stack([vector_of(text) for text in TEXTS])
    expected = -np.linalg.norm(vectors[1:] - vectors[0], axis=1)
    np.testing.assert_allclose(post("/similarity", said, encoder).json(), expected, rtol=1e-5)


def test_texts_are_ranked_by_the_first_model_that_ranks(ranking: Standing) -> None:
    answer = ranking.post("/rerank", {"query": "q", "texts": ["bird", "dam", "weir", "twin"], "truncate": True})
    assert [each["index"] for each in answer.json()] == [2, 1, 3, 0]  # of equal ones the first goes first
    scores = [each["score"] for each in answer.json()]
    np.testing.assert_allclose(scores, [0.98201, 0.88080, 0.88080, 0.11920], atol=1e-5)
    assert answer.headers["x-compute-characters"] == "19"
    said = {"query": "q", "texts": ["bird", "dam"], "raw_scores": True, "return_text": True}
    expected = [{"index": 1, "score": 2.0, "text": "dam"}, {"index": 0, "score": -2.0, "text": "bird"}]
    assert ranking.post("/rerank", said).json() == post("/", said, encoder := ranker()).json() == expected
    assert encoder.heard[0].texts == [("q", "bird"), ("q", "dam")]
    wrong = ranking.post("/rerank", {"query": "q", "texts": ["dam"], "truncation_direction": "Up"})
    rule = "truncation_direction='Up': must be one of left, right"
    assert (wrong.status_code, wrong.json()["error"]) == (422, rule)


def test_texts_and_pairs_are_labelled(labelling: Standing) -> None:
    pair: Any = "dam", "bird"
    inputs: list[tuple[Any, list[Any]]] = [("dam", ["dam"]), ([*pair], [pair]), ([["dam"], [*pair]], ["dam", pair])]
    for given, texts in inputs:
        answer = labelling.post("/predict", {"inputs": given}).json()
        assert labelling.encoder.heard[-1].texts == texts
        first = answer[0] if len(texts) > 1 else answer
        assert sum(each["score"] for each in first) == pytest.approx(1.0)
        likeliest = ["glad", "sad", "mad"] if texts[0] == "dam" else ["sad", "glad", "mad"]
        assert [each["label"] for each in first] == likeliest


def test_labels_that_do_not_exclude_each_other_have_scores_of_their_own(labelling: Standing) -> None:
    found = {each["label"]: each["score"] for each in post("/predict", {"inputs": "dam"}, labeller(True)).json()}
    assert found == pytest.approx({"sad": 0.5, "glad": 0.731058, "mad": 0.268941}, abs=1e-5)
    raw = labelling.post("/predict", {"inputs": "dam", "raw_scores": True}).json()
    assert [each["score"] for each in raw] == [1.0, 0.0, -1.0]


def test_tokens_are_shown_and_put_together_again(plain: Standing) -> None:
    encoder = HashingEncoder(facts=TextFacts(prompts={"query": "query: "}))
    shown = post("/tokenize", {"inputs": ["one two"], "prompt_name": "query"}, encoder).json()
    assert [each["text"] for each in shown[0]] == ["<s>", "query:", "one", "two"]
    assert shown[0][0] == {"id": 0, "text": "<s>", "special": True, "start": None, "stop": None}
    assert shown[0][2] == {"id": 3, "text": "one", "special": False, "start": 7, "stop": 10}
    assert len(plain.post("/tokenize", {"inputs": "one two", "add_special_tokens": False}).json()[0]) == 2
    assert plain.post("/decode", {"ids": [0, 4, 5]}).json() == ["4 5"]
    assert plain.post("/decode", {"ids": [[0, 4], [5]], "skip_special_tokens": False}).json() == ["0 4", "5"]


def test_offsets_of_tokens_are_bytes_of_utf_8() -> None:
    text = "ein Wehr für Größe 🐟 da"
    encoder = HashingEncoder(facts=TextFacts(prompts={"query": "für: "}))
    for prompt_name, whole in ((None, text), ("query", f"für: {text}")):
        (tokens,) = post("/tokenize", {"inputs": text, "prompt_name": prompt_name}, encoder).json()
        body = whole.encode()
        assert [body[each["start"] : each["stop"]].decode() for each in tokens if not each["special"]] == whole.split()


def test_the_first_model_is_described() -> None:
    def info(*encoders: HashingEncoder) -> Any:
        return asked(lambda server: server.client.get("/info"), *encoders).json()

    plain = info(HashingEncoder(), ranker())
    assert plain["model_id"] == "hashing" and plain["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (plain["max_input_length"], plain["max_client_batch_size"], plain["auto_truncate"]) == (6, MAX_TEXTS, True)
    assert info(ranker())["model_type"] == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    assert info(labeller())["model_type"]["classifier"]["label2id"] == {"sad": 0, "glad": 1, "mad": 2}


@subcases(("path", "document", "status", "kind", "rule"), [
    ("/embed", {"inputs": ""}, 400, "Empty", "inputs: must not be empty"),
    ("/embed", {"inputs": ["a", ""]}, 400, "Empty", "inputs[1]: must not be empty"),
    ("/embed", {"inputs": ["a"] * 51}, 413, "Validation", "inputs: has 51 texts, must have 1 to 50 (max_texts)"),
    ("/embed", {"inputs": "a b c d e f g", "truncate": False}, 413, "Validation", "inputs[0]: has 7 tokens"),
    ("/embed_sparse", {"inputs": "a"}, 424, "Backend", "model 'hashing': has no task embed_sparse; it has embed"),
    ("/rerank", {"query": "a", "texts": []}, 400, "Empty", "texts: must not be empty"),
    ("/rerank", {"query": "a"}, 422, "Validation", "texts: is missing"),
    ("/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation", "must be a list of one text or two"),
    ("/predict", {"inputs": 4}, 422, "Validation", "inputs=4: must be"),
    ("/similarity", {"inputs": {"sentences": ["a"]}}, 422, "Validation", "inputs.source_sentence: is missing"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [""]}}, 422, "Validation", "inputs.sentences"),
    ("/tokenize", {"inputs": 4}, 422, "Validation", "inputs: must be a list of texts, is 4"),
    ("/decode", {"ids": "a"}, 422, "Validation", "ids[0]: must be a list of token ids, is 'a'"),
    ("/decode", {"ids": []}, 400, "Empty", "ids: must not be empty"),
])  # fmt: skip
def test_what_is_wrong_has_teis_shape(
    path: str, document: Any, status: int, kind: str, rule: str, plain: Standing
) -> None:
    answer = plain.post(path, document)
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
    assert rule in answer.json()["error"]


def test_texts_have_the_weights_of_their_terms() -> None:
    answer = post("/embed_sparse", {"inputs": ["one", "two", "three"], "truncate": True}, HashingEncoder(), weigher())
    terms = [[(each["index"], each["value"]) for each in text] for text in answer.json()]
    assert terms == [[(7, 0.5), (30_000, 1.25)], [], [(9, 2.0)]]
    assert post("/", {"inputs": "two"}, weigher()).json() == [[]]


# What Vertex AI, SageMaker and OpenAPI's clients look for.


def test_a_body_of_vertex_ai_has_an_answer_for_each_instance_by_its_task(plain: Standing, labelling: Standing) -> None:
    instances = [{"inputs": TEXTS[0]}, {"inputs": TEXTS[1:], "normalize": True}]
    first, second = plain.post("/vertex", {"instances": instances, "parameters": {}}).json()["predictions"]
    np.testing.assert_allclose([*first, *second], UNIT, rtol=1e-6)
    ranking, label = {"query": "q", "texts": ["bird", "dam"]}, {"inputs": ["q", "dam"], "raw_scores": True}
    found = post("/vertex", {"instances": [ranking, label]}, ranker()).json()["predictions"]
    assert [each["index"] for each in found[0]] == [1, 0]
    assert found[1] == [{"label": "LABEL_0", "score": 2.0}]
    (labels,) = labelling.post("/vertex", {"instances": [{"inputs": "dam"}]}).json()["predictions"]
    assert labels[0]["label"] == "glad"


def test_the_first_wrong_instance_is_the_answer_to_all(plain: Standing) -> None:
    fine = {"inputs": "one"}
    for instances, status, kind in (
        ([fine, {"inputs": ""}, {}], 400, "Empty"), ("one", 422, "Validation"), ([fine] * (MAX_TEXTS + 1), 413, "Validation"),
    ):  # fmt: skip
        answer = plain.post("/vertex", {"instances": instances})
        assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
    assert plain.post("/vertex", {"instances": []}).json() == {"predictions": []}


async def test_the_endpoints_of_sagemaker_and_of_teis_description_are_there() -> None:
    paths = ("/ping", "/health", "/api-doc/openapi.json", "/openapi.json")
    async with served(HashingEncoder()) as server:
        ping, health, described, same = [await server.client.get(path) for path in paths]
    assert (ping.status_code, ping.json()) == (health.status_code, health.json())
    documents = [response.json() for response in (described, same)]
    assert [document.pop("servers") for document in documents] == [[{"url": ".."}], [{"url": "."}]]
    assert documents[0] == documents[1] and "/embed" in documents[0]["paths"]


LABELS = ("O", "B-PER", "I-PER", "LOC")


def namer(max_length: int = 20) -> HashingEncoder:
    """Return a model that labels tokens: the number of a word is that of its label."""
    encoder = HashingEncoder(
        "namer", max_length=max_length, facts=TextFacts(tasks=(TextTask.PREDICT_TOKENS,), labels=LABELS)
    )
    encoder.lists_width = len(LABELS)
    texts = {"Ada King met Bob in New York": [9, 1, 2, 0, 1, 0, 3, 3], "nobody": [9, 0], "Ada Bob": [9, 1, 1]}
    encoder.lists = {
        text: [[8.0 if place == number else 0.0 for place in range(4)] for number in numbers]
        for text, numbers in texts.items()
    }
    return encoder


def test_tokens_are_joined_to_entities() -> None:
    found = post("/predict_tokens", {"inputs": "Ada King met Bob in New York"}, HashingEncoder(), namer()).json()
    assert [(each["entity_group"], each["word"], each["start"], each["end"]) for each in found] == [
        ("PER", "Ada King", 0, 8), ("PER", "Bob", 13, 16), ("LOC", "New York", 20, 28),
    ]  # fmt: skip
    assert all(each["score"] == pytest.approx(0.998995, abs=1e-5) for each in found)


def test_each_token_may_be_wanted_and_none_left_out() -> None:
    said = {"inputs": ["Ada Bob", "nobody"], "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
    first, second = post("/predict_tokens", said, namer()).json()
    assert [(each["entity"], each["word"]) for each in first] == [("B-PER", "Ada"), ("B-PER", "Bob")]
    assert [(each["entity"], each["word"]) for each in second] == [("O", "nobody")]
    assert post("/predict_tokens", {"inputs": ["nobody"]}, namer()).json() == [[]]


def test_the_last_token_of_a_text_that_was_cut_is_a_special_one() -> None:
    encoder = namer()
    assert encoder.lists is not None
    encoder.lists["Ada King met Bob in New York"] = encoder.lists["Ada King met Bob in New York"][:3]
    found = post("/predict_tokens", {"inputs": "Ada King met Bob in New York"}, encoder).json()
    assert [each["word"] for each in found] == ["Ada"]


@pytest.mark.parametrize(("document", "status", "rule"), [
    ({"inputs": 3}, 422, "inputs: must be a list of texts, is 3"), ({"inputs": ["a", ""]}, 400, "inputs[1]: must not be empty"),
    ({"inputs": "a", "parameters": {"aggregation_strategy": "max"}}, 422, "aggregation_strategy='max': must be one of simple, none"),
    ({"inputs": "a", "model": "hashing"}, 424, "model 'hashing': has no task predict_tokens; it has embed"),
])  # fmt: skip
def test_what_is_wrong_is_named(document: Any, status: int, rule: str) -> None:
    answer = post("/predict_tokens", document, namer(), HashingEncoder())
    assert answer.status_code == status and rule in answer.json()["error"]
