"""Estimators of scikit-learn in files are served. `make test-sklearn` runs these where it is installed."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.repository.shelf import write
from tests.served import serving, weir_here

from weir.catalog.loading import load_target
from weir.catalog.sources import Trust
from weir.errors import InvalidRequest, SettingsError
from weir.inprocess import InProcess

pytestmark = pytest.mark.sklearn

FLOWER = [5.1, 3.5, 1.4, 0.2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a classifier, saved in both ways, a pipeline of texts, and one with a step of its own."""
    import joblib
    import skops.io
    from sklearn.datasets import load_iris
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    at = tmp_path_factory.mktemp("estimators")
    rows, kinds = load_iris(return_X_y=True)
    flowers = LogisticRegression(max_iter=500).fit(rows, kinds)
    skops.io.dump(flowers, at / "iris.skops")
    joblib.dump(flowers, at / "iris.joblib")
    texts = make_pipeline(TfidfVectorizer(), LogisticRegression())
    skops.io.dump(texts.fit(["good film", "bad film", "so good", "awful"], ["+", "-", "+", "-"]), at / "mood.skops")
    own = make_pipeline(FunctionTransformer(json.dumps))
    skops.io.dump(own, at / "own.skops")
    return at


def test_a_file_of_skops_is_served(folder: Path) -> None:
    with serving(folder / "iris.skops", folder / "mood.skops", "--workers", "1") as (_, client):
        assert client.post("/infer/iris", json=FLOWER).json() == 0
        assert client.post("/infer/mood", json="a good film").json() == "+"
        for item, wrong in (
            ([1.0], "an item must be a list of numbers, 4 of them: it has 1 values"),
            ("text", "an item must be a list of numbers, 4 of them: it has 'text'"),
            ([1, 2, "3", 4], "item[2]='3': must be a number"),
        ):
            answer = client.post("/infer/iris", json=item)
            assert (answer.status_code, wrong in answer.text) == (400, True), answer.text
        assert client.get("/v2/models/iris").json()["platform"] == "sklearn"


def test_another_method(folder: Path) -> None:
    with InProcess(str(folder / "iris.skops"), executor="thread", params={"method": "predict_proba"}) as client:
        likely = client.infer("iris", FLOWER)
    assert len(likely) == 3 and abs(sum(likely) - 1) < 1e-9 and max(likely) == likely[0]


def test_a_repository_has_estimators_too(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, {"iris/1/model.skops": (folder / "iris.skops").read_bytes()})
    with serving("--model-repository", tmp_path, "--workers", "1") as (_, client):
        assert client.post("/infer/iris", json=FLOWER).json() == 0
    write(tmp_path, {"old/1/model.joblib": (folder / "iris.joblib").read_bytes()})
    with pytest.raises(SettingsError, match=r"old/1: model\.joblib: loading a pickle file can run arbitrary code"):
        InProcess(model_repository=str(tmp_path), load=["old"])


def test_columns_have_names(folder: Path, tmp_path: Path) -> None:
    import skops.io
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit([[0.0, 1.0], [2.0, 3.0]])
    scaler.feature_names_in_ = __import__("numpy").array(["width", "height"], dtype=object)  # as fitted with a table
    skops.io.dump(scaler, tmp_path / "scaler.skops")
    with InProcess(str(tmp_path / "scaler.skops"), executor="thread", params={"method": "transform"}) as client:
        assert client.infer("scaler", {"height": 3.0, "width": 0.0}) == [-1.0, 1.0]
        assert client.infer("scaler", [0.0, 3.0]) == [-1.0, 1.0]
        with pytest.raises(InvalidRequest, match="must have the keys width, height: it lacks 'width'"):
            client.infer("scaler", {"height": 3.0})
        with pytest.raises(InvalidRequest, match="it has 'depth'"):
            client.infer("scaler", {"height": 3.0, "width": 0.0, "depth": 1})


def test_pickles_and_unknown_types_are_loaded_only_where_that_was_allowed(folder: Path) -> None:
    def refused(*arguments: Any) -> str:
        done = weir_here("check", *arguments, cwd=folder)
        assert done.returncode == 2, done
        return done.stderr

    assert "if you trust it, set --allow-pickle" in refused("iris.joblib")
    found: Any = load_target(str(folder / "iris.joblib"), trust=Trust(pickles=True))
    assert (found.features, found.examples) == (4, ([0.0] * 4,))
    assert "types that may run code; if you trust it, set --trust-type json.dumps" in refused("own.skops")
    assert "method='predict': Pipeline has transform" in refused("own.skops", "--trust-type", "json.dumps")


def test_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.skops").write_bytes(b"no zip")
    with pytest.raises(SettingsError, match=r"broken: broken\.skops: cannot be loaded: BadZipFile: "):
        load_target(str(tmp_path / "broken.skops"))
