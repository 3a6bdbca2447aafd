"""Models by their id: from a hub on this machine, by the real package, in processes of their own as its variables are read at its import."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.served import weir_here
from tests.text_models import loading, tiny
from tests.text_models.hub import TOKEN, Hub, hash_of, running
from tests.text_models.onnx_files import export

from weir.errors import SettingsError
from weir.text_models.checkpoint.hub import ModelId, RepositoryFile, parse_target, wanted_files
from weir.text_models.checkpoint.weights import open_tensors

CLOSED = "http://127.0.0.1:1"  # nobody listens


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with the repository acme/small, which has files of all kinds."""
    folder = tiny.sentence_model(tmp_path / "small", dense=20)
    further = ["README.md", "train.json", "tf_model.h5", "onnx/model.onnx", "openvino/config.json", "pytorch_model.bin"]
    for more in further:
        (folder / more).parent.mkdir(exist_ok=True)
        (folder / more).write_bytes(b"x")
    with running(Hub({"acme/small": folder})) as hub:
        yield hub


class Home:
    """A cache for the hub's files, and processes that use it."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder

    def load(self, *words: str, program: str = "load", **variables: str) -> subprocess.CompletedProcess[str]:
        """Load a model in a process."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "WEIR_"))}
        environment |= {"HF_HOME": str(self.folder), "HF_ENDPOINT": self.hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
        return subprocess.run(
            [sys.executable, "-m", loading.__name__, program, *words], env=environment | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def error(self, *words: str, program: str = "load", **variables: str) -> str:
        """Return the error of a process that fails with one line."""
        done = self.load(*words, program=program, **variables)
        assert done.returncode == 1, done
        line = done.stderr.splitlines()[-1]
        assert line.startswith(words[0]), done.stderr
        return line

    def directory(self, word: str, **variables: str) -> Path:
        """Return the directory of a model that is loaded."""
        done = self.load(word, program="load", **variables)
        assert not done.returncode, done.stderr
        return Path(done.stdout.strip())


@pytest.fixture
def home(hub: Hub, tmp_path: Path) -> Home:
    return Home(hub, tmp_path / "home")


NEEDED = [
    "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "config.json", "config_sentence_transformers.json",
    "model.safetensors", "modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
]  # fmt: skip


def test_only_what_is_needed_is_loaded_and_only_once(hub: Hub, home: Home) -> None:
    directory = home.directory("acme/small")
    snapshots = home.folder / "hub" / "models--acme--small" / "snapshots"
    assert directory.is_relative_to(snapshots / hub.commit("acme/small"))
    assert sorted(hub.fetched()) == NEEDED
    hub.requests.clear()
    assert home.directory("acme/small@main") == directory
    assert hub.fetched() == []
    hub.requests.clear()
    assert home.directory("acme/small", HF_HUB_OFFLINE="1") == directory
    assert hub.requests == []


def test_of_a_family_that_is_not_computed_the_onnx_file_alone_is_loaded(tmp_path: Path) -> None:
    folder = tiny.sentence_model(tmp_path / "new", dense=20)
    export(folder, folder / "onnx" / "model.onnx", beside=True)
    (folder / "onnx" / "model_fp16.onnx").write_bytes((folder / "onnx" / "model.onnx").read_bytes())
    config = (folder / "config.json").read_text().replace('"model_type": "bert"', '"model_type": "funnel"')
    (folder / "config.json").write_text(config)
    with running(Hub({"acme/new": folder})) as hub:
        home = Home(hub, tmp_path / "home")
        done = home.load("acme/new", program="load_onnx")
        assert not done.returncode, done.stderr
        fetched = {"onnx/model.onnx", "onnx/model.onnx_data", *NEEDED} - {"model.safetensors"}
        assert set(hub.fetched()) == fetched
        hub.requests.clear()
        assert home.load("acme/new", program="load_onnx", HF_HUB_OFFLINE="1").stdout == done.stdout
        assert hub.requests == []
        refused = home.load("acme/new", "q4", program="load_onnx").stderr.splitlines()[-1]
    there = "onnx/model.onnx, onnx/model_fp16.onnx"
    rule = f"acme/new: has no model_q4.onnx: there are {there}; --runtime torch serves what transformers reads"
    assert refused == rule


def test_a_commit_and_a_branch_are_revisions(hub: Hub, home: Home) -> None:
    hub.branches |= {"v1.5", "refs/pr/5"}
    commit = hub.commit("acme/small")
    for revision in (commit, "v1.5", "refs/pr/5"):
        assert home.directory(f"acme/small@{revision}").name == commit
    assert f"{hub.url} has no revision 'v2' of acme/small" in home.error("acme/small@v2")


def test_what_the_hub_does_not_have_or_does_not_show(hub: Hub, home: Home) -> None:
    assert f"is not a directory here, and {hub.url} has no such model" in home.error("acme/none")
    hub.gated.add("acme/small")
    assert f"is gated: accept its terms at {hub.url}/acme/small, and set HF_TOKEN" in home.error("acme/small")
    assert home.directory("acme/small", HF_TOKEN=TOKEN).is_dir()


def test_without_the_hub_the_cache_serves(hub: Hub, home: Home) -> None:
    assert "is not, or not wholly, in the cache" in home.error("acme/small", HF_HUB_OFFLINE="1")
    refused = home.load("acme/small", program="check_id", HF_ENDPOINT=CLOSED).stderr.splitlines()
    rule = f"acme/small: is not a directory here, and {CLOSED} cannot be read: "
    assert len(refused) == 1 and refused[0].startswith(rule)
    assert rule in home.error("acme/small", HF_ENDPOINT=CLOSED)
    directory = home.directory("acme/small")
    done = home.load("acme/small", HF_ENDPOINT=CLOSED)
    assert done.stdout.strip() == str(directory)
    assert "cannot be reached; serving the cached files" in done.stderr


def test_what_is_cut_off_is_begun_again_without_what_was_left(hub: Hub, home: Home) -> None:
    file = hub.folders["acme/small"] / "model.safetensors"
    tiny.save(file, {**open_tensors(file), "more": np.zeros(4 << 20, np.float32)})
    hub.cut["model.safetensors"] = (10 << 20) + 1000  # the package receives 10 MiB at once
    assert "answered 503; complete files stay in the cache" in home.error("acme/small")
    assert "is not, or not wholly, in the cache" in home.error("acme/small", HF_HUB_OFFLINE="1")
    hub.cut.clear()
    left = home.folder / f"hub/models--acme--small/blobs/{hash_of(file)}.incomplete"
    left.write_bytes(b"x" * 1000)  # as a process leaves it on a file system without locks
    hub.requests.clear()
    assert (home.directory("acme/small") / "model.safetensors").read_bytes() == file.read_bytes()
    assert {begin for _, _, begin in hub.requests} == {""}


def test_a_file_that_is_not_what_its_hash_says_is_removed(hub: Hub, home: Home) -> None:
    file = hub.folders["acme/small"] / "model.safetensors"
    hub.tags["model.safetensors"] = "a" * 64
    assert "model.safetensors is not what" in home.error("acme/small")
    hub.tags.clear()
    assert (home.directory("acme/small") / "model.safetensors").read_bytes() == file.read_bytes()


def test_an_id_is_checked_before_another_library_tries_it(hub: Hub, home: Home) -> None:
    assert "has no such model" in home.load("acme/none", program="check_id").stderr
    assert home.load("acme/small", program="check_id").stdout == "acme/small\n"
    directory = home.directory("acme/small")
    assert home.load("acme/small", program="check_id", HF_ENDPOINT=CLOSED).stdout == f"{directory}\n"


def test_a_cache_that_cannot_grow(hub: Hub, home: Home) -> None:
    file = hub.folders["acme/small"] / "model.safetensors"
    tiny.save(file, {**open_tensors(file), "more": np.zeros(4 << 20, np.float32)})
    error = home.error("acme/small", program="load_beyond_the_limit")
    assert f"the cache {home.folder / 'hub'} cannot grow: File too large; complete files stay in the cache" in error
    assert home.directory("acme/small").is_dir()


def test_pickles_are_loaded_only_where_they_are_allowed(hub: Hub, home: Home) -> None:
    folder = hub.folders["acme/small"]
    (folder / "model.safetensors").unlink()
    error = home.error("acme/small")
    assert "has only pickles for pytorch_model.bin" in error and "--allow-pickle" in error
    assert hub.fetched() == []
    assert "pytorch_model.bin: is damaged, or is not an archive of tensors" in home.load("acme/small", "pickle").stderr
    assert "pytorch_model.bin" in hub.fetched()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("BAAI/bge-small-en-v1.5", ModelId("BAAI/bge-small-en-v1.5")), ("bert-base-uncased", ModelId("bert-base-uncased")),
        ("a/b@refs/pr/3", ModelId("a/b", "refs/pr/3")), ("/a/b", Path("/a/b")), ("./a", Path("a").resolve()), ("a/b/c", Path("a/b/c").resolve()),
        ("a--b/c", Path("a--b/c").resolve()), ("a/b@", Path("a/b@").resolve()), ("tests", Path("tests").resolve()),
    ],
)  # fmt: skip
def test_targets_are_directories_or_ids(target: str, expected: ModelId | Path) -> None:
    assert parse_target(target) == expected


def chosen(*paths: str, allow_pickle: bool = False) -> list[str]:
    files = [RepositoryFile(path, 1) for path in ("config.json", *paths)]
    return [file.path for file in wanted_files("it", files, allow_pickle=allow_pickle)]


def test_one_form_of_the_weights_is_chosen() -> None:
    parts = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert chosen("model.safetensors", *parts) == ["config.json", "model.safetensors"]
    assert chosen(*parts, "pytorch_model.bin", "other.safetensors") == ["config.json", *parts]
    assert chosen("0_Transformer/model.safetensors", "0_Transformer/config.json", "onnx/model.onnx") == [
        "config.json", "0_Transformer/model.safetensors", "0_Transformer/config.json",
    ]  # fmt: skip
    pickled = ["pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt", "optimizer.pt"]
    assert chosen(*pickled, allow_pickle=True) == ["config.json", *pickled[:3]]
    assert chosen("model.safetensors", *pickled) == ["config.json", "model.safetensors"]
    with pytest.raises(SettingsError, match="it: has no weights"):
        chosen("tf_model.h5")
    with pytest.raises(SettingsError, match=r"it: has neither config.json nor modules.json"):
        wanted_files("it", [RepositoryFile("model.gguf", 1)])


def test_a_server_by_id(home: Home, tmp_path: Path) -> None:
    done = home.load("acme/small", program="serve", WEIR_CACHE=str(tmp_path / "cache"))
    assert done.stdout.strip() == "20", done.stderr


def test_an_id_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    done = weir_here("embed", "serve", "acme/small@@v1", cwd=tmp_path)
    assert done.returncode
    assert "acme/small@@v1: must be a directory with a model, or the id of one" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_hubs_library_logs_comes_once(home: Home) -> None:
    assert home.load("owner/name", program="log").stderr.splitlines() == ["server: slow today"]
