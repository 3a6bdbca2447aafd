"""`weir embed search`, from files to what it prints."""

import json
from pathlib import Path

from examples.docstrings import labelled
from tests.rings import subcases
from tests.served import weir_here
from tests.text_models import tiny


def test_the_nearest_texts_are_shown(tmp_path: Path) -> None:
    """The file is a real one: every eighth paragraph of the example's."""
    model, texts = tiny.sentence_model(tmp_path / "model", "bert", layers=2), tmp_path / "docstrings.jsonl"
    lines = [json.dumps({"label": label, "text": text}) for label, text in labelled()][::8]
    texts.write_text("\n".join(lines))
    query = json.loads(lines[3])["text"]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = weir_here("embed", "search", texts, query, "--model", model, "-n", 2, env=cache)
    assert shown.returncode == 0 and "1.000" in shown.stdout.split("\n")[1]
    shown = weir_here("embed", "search", texts, query, "--model", model, "-n", 2, "--json", env=cache)
    assert json.loads(shown.stdout.splitlines()[0])["place"] == 4


@subcases(
    ("words", "said"),
    [
        (("nothing.txt", "a"), "nothing.txt: cannot be read: [Errno 2] No such file or directory: 'nothing.txt'"),
        ((__file__, ""), "QUERY: is empty, must be a text"),
    ],
)
def test_what_is_wrong_takes_one_line(words: tuple[str, ...], said: str) -> None:
    done = weir_here("embed", "search", *words)
    assert (done.returncode, done.stderr) == (2, f"weir: {said}\n")
