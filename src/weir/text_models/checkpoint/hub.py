"""Models by their id on the Hugging Face Hub: which files of a repository a server needs, and their download into the cache of all of Hugging Face's tools.

The package huggingface_hub does the transfer, so its variables hold: HF_HOME and HF_HUB_CACHE for the cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_HUB_DISABLE_PROGRESS_BARS. It is imported when the first id is met.

Each process transfers a file to a place of its own and then renames it, as locks on a shared one do not hold on every file system. A start
that is cut off begins its unfinished file again.
"""

import errno
import glob
import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from weir.errors import SettingsError, add_extra

# An id is NAME or OWNER/NAME, of letters, digits, "-", "_" and "."; a revision is a branch, a tag or a commit.
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_ID = re.compile(rf"(?P<repository>{_PART}(?:/{_PART})?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
PATH_STARTS = ("/", "./", "../", "~")
_LONGEST_ID = 96

MAIN = "main"  # the revision of an id without one

# What is read of a repository in addition to its weights, at its root and in the folders of its modules.
CONFIGURATIONS = frozenset(
    {
        "config.json", "modules.json", "config_sentence_transformers.json", "router_config.json",
        "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json", "sentence_camembert_config.json",
        "sentence_xlm-roberta_config.json", "sentence_mpnet_config.json",
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt",
        "sentencepiece.bpe.model", "sentencepiece.model", "spiece.model", "spm.model", "tokenizer.model",
        "artifact.metadata", "preprocessor_config.json", "processor_config.json",
    }
)  # fmt: skip
_MODULE = re.compile(r"\d+_\w+|query_\d+_\w+|document_\d+_\w+|query|document", re.ASCII)  # the folders of modules
_MODULE_OF_WEIGHTS = re.compile(r"[1-9]\d*_\w+/", re.ASCII)  # behind the network, which may be 0_Transformer
_SHARD = r"{}-\d+-of-\d+\.{}"
# The parts of BGE-M3 that make sparse and token vectors.
PICKLED_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
_ONNX_FOLDER = "onnx"
_ENDINGS = (".safetensors", ".bin", ".onnx")  # of files with weights

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KEPT = "; complete files stay in the cache"

logger = logging.getLogger("weir")


class ModelId(NamedTuple):
    """An id on the hub: the repository, NAME or OWNER/NAME, and a revision: a branch, a tag or a commit."""

    repository: str
    revision: str = MAIN

    @property
    def name(self) -> str:
        """The name without the owner."""
        return self.repository.rpartition("/")[2]

    def __str__(self) -> str:
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"


class RepositoryFile(NamedTuple):
    """A file of a repository: its path, with "/" between folders, and its size in bytes."""

    path: str
    size: int


def parse_target(target: str) -> ModelId | Path:
    """Return the directory or the id that `target` names: a directory if it exists, looks like a path, or is no id."""
    path = Path(target).expanduser()
    if path.exists() or target.startswith(PATH_STARTS) or target in (".", ".."):
        return path.resolve()
    found = _ID.fullmatch(target)
    if found is None or ".." in target or "--" in found["repository"] or len(found["repository"]) > _LONGEST_ID:
        return path.resolve()
    return ModelId(found["repository"], found["revision"] or MAIN)


def local_directory(
    target: str, *, allow_pickle: bool = False, onnx: Callable[[Path | None], Sequence[str]] | None = None
) -> Path:
    """Return the directory of a model: `target` itself, or for an id its files in the cache, which are downloaded where they are missing.

    Without the hub, or with HF_HUB_OFFLINE, the files that the cache has are returned, if it has all that are needed.

    Args:
        target: a directory or an id, see parse_target.
        allow_pickle: also load the weights of a repository that has them as pickles alone.
        onnx: takes the path of config.json, None if there is none, and returns the names of ONNX files of which one is loaded, in the folder onnx or at the
            root, in place of weights; none for the weights.

    Raises SettingsError, in one line, for an id that the hub does not have or does not show to this user, a repository without usable weights, a hub that
    cannot be reached, and a cache without space. Complete files stay in the cache.
    """
    source = parse_target(target)
    if isinstance(source, Path):
        return source
    hub = _library(source)

    def choose(files: list[RepositoryFile]) -> list[RepositoryFile]:
        names: Sequence[str] = ()
        if onnx is not None:
            has_config = any(file.path == "config.json" for file in files)
            config = (
                hub.hf_hub_download(source.repository, "config.json", revision=source.revision) if has_config else ""
            )
            names = onnx(Path(config) if config else None)
        return wanted_files(str(source), files, allow_pickle=allow_pickle, onnx=names)

    with _explained(source, hub):
        try:
            commit, files = _listed(source, hub)
        except (hub.errors.OfflineModeIsEnabled, hub.errors.HTTPError) as error:
            return _cached(source, hub, choose, error)
        chosen = choose(files)
        missing = _missing(source, hub, commit, chosen)
        _check_space(source, hub, missing)
        names = [glob.escape(file.path) for file in chosen]
        folder = Path(hub.snapshot_download(source.repository, revision=source.revision, allow_patterns=names))
        for file in missing:
            _check_content(source, hub, folder / file.path)
        return folder


def check_id(target: str) -> str:
    """Return `target`, the id of a model that another library loads, or its folder in the cache where the hub cannot be reached.

    Raises SettingsError, in one line, if neither has it: libraries try for half a minute.
    """
    source = ModelId(target)
    hub = _library(source)
    with _explained(source, hub):
        try:
            hub.HfApi().model_info(target, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT)
        except (hub.errors.OfflineModeIsEnabled, hub.errors.HTTPError) as error:
            return str(_cached(source, hub, _configuration, error))
    return target


def _configuration(files: list[RepositoryFile]) -> list[RepositoryFile]:
    return [file for file in files if file.path == "config.json"]


def wanted_files(
    source: str, files: Sequence[RepositoryFile], *, allow_pickle: bool = False, onnx: Sequence[str] = ()
) -> list[RepositoryFile]:
    """Return the files of a repository that a server reads: configurations, tokenizer, modules, and weights in one form, safetensors before pickles; or the
    first of the files `onnx` that there is, in place of the weights of the network.

    Raises SettingsError naming `source` if there are no weights, or none that may be read.
    """
    names = {file.path for file in files}
    if "config.json" not in names and "modules.json" not in names:
        raise SettingsError(
            f"{source}: has neither config.json nor modules.json: must be a model of texts for transformers"
        )
    wanted = {path for path in names if PurePosixPath(path).name in CONFIGURATIONS and _is_read(path)}
    if onnx:
        modules = {name for name in names if _MODULE_OF_WEIGHTS.match(name)}
        wanted |= _onnx_files(source, names, onnx) | _weights(source, modules, allow_pickle, required=False)
    else:
        wanted |= _weights(source, names, allow_pickle)
    return [file for file in files if file.path in wanted]


def _is_read(path: str) -> bool:
    """Return whether a configuration stands at the root or in a folder of a module."""
    folders = PurePosixPath(path).parts[:-1]
    return all(_MODULE.fullmatch(folder) for folder in folders) and len(folders) <= 2


def _weights(source: str, names: set[str], allow_pickle: bool, *, required: bool = True) -> set[str]:
    """Return the weights of the network and of all modules, each as safetensors if there are any. Unless `required` there may be none."""
    folders = {str(PurePosixPath(name).parent) for name in names if _is_read(name)}
    wanted: set[str] = set()
    pickles: set[str] = set()
    for folder in folders:
        prefix = "" if folder == "." else f"{folder}/"
        safe = _in_one_form(names, prefix, "model", "safetensors")
        wanted |= safe
        if not safe:
            pickles |= _in_one_form(names, prefix, "pytorch_model", "bin")
    if allow_pickle:
        wanted |= pickles | (set(PICKLED_HEADS) & names)
    elif pickles:
        raise SettingsError(
            f"{source}: has only pickles for {min(pickles)}, and pickles can hold code: --allow-pickle reads the tensors in them, and runs nothing"
        )
    if not wanted and required:
        raise SettingsError(f"{source}: has no weights: must hold model.safetensors, or its index with the parts")
    return wanted


def _in_one_form(names: set[str], prefix: str, stem: str, suffix: str) -> set[str]:
    """Return the one file of weights under `prefix`, else its index and the parts, else nothing."""
    if f"{prefix}{stem}.{suffix}" in names:
        return {f"{prefix}{stem}.{suffix}"}
    index = f"{prefix}{stem}.{suffix}.index.json"
    if index not in names:
        return set()
    shard = re.compile(re.escape(prefix) + _SHARD.format(re.escape(stem), suffix))
    return {index, *(name for name in names if shard.fullmatch(name))}


def _onnx_files(source: str, names: set[str], onnx: Sequence[str]) -> set[str]:
    found = [path for name in onnx for path in (f"{_ONNX_FOLDER}/{name}", name) if path in names]
    if not found:
        there = sorted(name for name in names if name.endswith(".onnx"))
        raise SettingsError(
            f"{source}: has no {' or '.join(onnx)}: there are {', '.join(there) or 'no ONNX files'}; --runtime torch serves what transformers reads"
        )
    path = found[0]
    # Weights beyond 2 GiB stand in a file next to the graph.
    externals = {f"{path}_data", f"{path}.data", f"{path.removesuffix('.onnx')}_data"} & names
    return {path, *externals}


def _library(source: ModelId) -> Any:
    """Return the package huggingface_hub. Raises SettingsError, with the command that installs it, if it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise SettingsError(
            f"{source}: is not a directory here; model ids need huggingface_hub; {add_extra('embed')}"
        ) from None
    log_its_lines_once()
    return huggingface_hub


def log_its_lines_once() -> None:
    """Take away the handler of huggingface_hub's own, which it adds when the module below is first loaded: the log has its lines anyhow."""
    import huggingface_hub.utils.logging  # noqa: F401 - now, or it would come with the first download

    logging.getLogger("huggingface_hub").handlers.clear()


def _listed(source: ModelId, hub: Any) -> tuple[str, list[RepositoryFile]]:
    """Return the commit of the revision, and all files of the repository there."""
    api, seconds = hub.HfApi(), hub.constants.HF_HUB_ETAG_TIMEOUT
    commit = str(api.model_info(source.repository, revision=source.revision, timeout=seconds).sha)
    tree = api.list_repo_tree(source.repository, revision=commit, recursive=True)
    return commit, [RepositoryFile(entry.path, entry.size) for entry in tree if isinstance(entry, hub.hf_api.RepoFile)]


def _cached(
    source: ModelId, hub: Any, choose: Callable[[list[RepositoryFile]], list[RepositoryFile]], error: Exception
) -> Path:
    """Return the files in the cache, as the hub cannot be asked. Raises `error` if the cache does not have all of them, or if it is the
    hub's own refusal."""
    if isinstance(error, hub.errors.HfHubHTTPError) and error.response.status_code < 500:
        raise error
    revision, names = source.revision, ["config.json", "modules.json"]
    with suppress(hub.errors.CachedRepoTreeNotFoundError):
        # Another program has put the files there, without a list of them.
        listed = hub.get_cached_repo_tree(source.repository, revision=revision)
        names = [glob.escape(file.path) for file in choose([RepositoryFile(file.path, file.size) for file in listed])]
    try:
        folder = Path(
            hub.snapshot_download(source.repository, revision=revision, local_files_only=True, allow_patterns=names)
        )
    except hub.errors.LocalEntryNotFoundError:
        raise error from None
    if not any(file.suffix in _ENDINGS for file in folder.rglob("*")):  # an earlier start got no further
        raise error from None
    if not isinstance(error, hub.errors.OfflineModeIsEnabled):
        logger.warning("%s: %s cannot be reached; serving the cached files", source, hub.constants.ENDPOINT)
    return folder


@contextmanager
def _explained(source: ModelId, hub: Any) -> Iterator[None]:
    """Turn the errors of a download into a SettingsError of one line that says what to do."""
    try:
        yield
    except (hub.errors.HTTPError, OSError, ValueError) as error:
        raise SettingsError(f"{source}: {_explanation(source, hub, error)}") from error


def _explanation(source: ModelId, hub: Any, error: Exception) -> str:
    site, errors, repository = hub.constants.ENDPOINT, hub.errors, source.repository
    if isinstance(error, errors.GatedRepoError):
        return f"is gated: accept its terms at {site}/{repository}, and set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{site} has no revision {source.revision!r} of {repository}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"is not a directory here, and {site} has no such model, or not for this user (HF_TOKEN)"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"is not, or not wholly, in the cache {hub.constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to download it"
    if isinstance(error, errors.HfHubHTTPError):
        return f"{site} answered {error.response.status_code}{_KEPT}"
    if isinstance(error, errors.HTTPError):
        return f"is not a directory here, and {site} cannot be read: {_line(error)}{_KEPT}"
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return f"the cache {hub.constants.HF_HUB_CACHE} cannot grow: {error.strerror}{_KEPT}"
    return f"cannot be downloaded: {_line(error)}{_KEPT}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _missing(source: ModelId, hub: Any, commit: str, files: Iterable[RepositoryFile]) -> list[RepositoryFile]:
    """Return the files that the cache does not have at this commit."""
    return [
        file
        for file in files
        if not isinstance(hub.try_to_load_from_cache(source.repository, file.path, revision=commit), str)
    ]


def _check_space(source: ModelId, hub: Any, missing: Iterable[RepositoryFile]) -> None:
    """Raise SettingsError if the cache's disk has no room for the missing files."""
    cache = Path(hub.constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    needed, free = sum(file.size for file in missing), shutil.disk_usage(existing).free
    if needed > free:
        raise SettingsError(
            f"{source}: its files take {needed:,} more bytes, and {cache} has {free:,} free: free some space, or set HF_HOME to a directory on another disk"
        )


def _check_content(source: ModelId, hub: Any, path: Path) -> None:
    """Raise SettingsError, and remove a file from the cache, if it is not what its name says: that of a large file is its SHA-256."""
    blob = path.resolve()
    if len(blob.name) != hashlib.sha256().digest_size * 2:
        return
    with blob.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == blob.name:
            return
    blob.unlink()
    path.unlink()
    raise SettingsError(
        f"{source}: {path.name} is not what {hub.constants.ENDPOINT} has; it is removed from the cache: start again"
    )
