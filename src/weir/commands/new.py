"""`weir new`: writes a small project, with a model, a test of it, settings and a Dockerfile."""

from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, NamedTuple

import typer

from weir.errors import SettingsError

IMAGE = "weir"  # what the project's own Dockerfile builds
REPOSITORY = "https://github.com/weir-serving/weir"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI has torch with CUDA


class ProjectKind(StrEnum):
    """Says what a new project serves."""

    PLAIN = "plain"
    SKLEARN = "sklearn"
    TORCH = "torch"
    ONNX = "onnx"
    HF = "hf"
    STREAM = "stream"


class _Project(NamedTuple):
    """A kind of project. Its files are in projects/, where $NAME stands for a value.

    `target` is what is served, `extras` are Weir's extras, `more` are other requirements, and `make` is a program that is run once
    before the model is served.
    """

    target: str
    extras: str = "client"
    more: tuple[str, ...] = ()
    make: str = ""


# Served by its id, so that the project has no file of a model; a folder with one may take the id's place.
_HUGGING_FACE = "hf:text-classification=distilbert/distilbert-base-uncased-finetuned-sst-2-english"

_PROJECTS: Mapping[ProjectKind, _Project] = {
    ProjectKind.PLAIN: _Project("model.py:Lengths"),
    ProjectKind.SKLEARN: _Project("model.skops", "client,sklearn", make="train.py"),
    ProjectKind.TORCH: _Project("model.py:Classifier", more=("torch",)),
    ProjectKind.ONNX: _Project("model.onnx", "client,onnx", ("onnx",), "export.py"),
    ProjectKind.HF: _Project(_HUGGING_FACE, "client,transformers", ("torch",)),
    ProjectKind.STREAM: _Project("model.py:Words"),
}
_COMMON = ("weir.toml", "requirements.txt", "Dockerfile", "README.md")  # which every project has

_CPU = f"--extra-index-url {CPU_INDEX}"
_FOR_GPUS = (
    "# torch for the CPU; for a GPU, delete the --extra-index-url: PyPI's torch brings CUDA, several gigabytes\n"
)
_ABOUT_TORCH = f"""
`requirements.txt` and `Dockerfile` install torch for the CPU, from {CPU_INDEX}.
For a GPU, delete the `--extra-index-url` in both: PyPI's torch brings CUDA, several gigabytes.
"""


def files_of(template: ProjectKind, name: str) -> dict[str, str]:
    """Return the content of each file of a new project, by its name."""
    project, templates = _PROJECTS[template], files("weir.commands") / "projects"
    torch = "torch" in project.more
    run = f"python {project.make}\n" if project.make else ""
    # The image has Weir, and pip adds what an extra needs. What only tests need stays out.
    extras = [extra for extra in project.extras.split(",") if extra != "client"]
    inside = [*([f'"weir-serving[{",".join(extras)}]"'] if extras else []), *project.more, *([_CPU] if torch else [])]
    install = f"RUN pip install --no-cache-dir {' '.join(inside)}\n" if inside else ""
    values = {
        **project._asdict(),
        "name": name,
        "image": IMAGE,
        "repository": REPOSITORY,
        "required": "".join(f"{each}\n" for each in (*project.more, "pytest")),
        "torch": f"{_FOR_GPUS}{_CPU}\n" if torch else "",
        "about_torch": _ABOUT_TORCH if torch else "",
        "install": (_FOR_GPUS if torch else "") + install,
        "make": run,
        "make_in_image": f"RUN {run}" if run else "",
    }
    own = sorted(file.name for file in (templates / template).iterdir())
    found = [
        *((templates / template, file) for file in own),
        *((templates / "common", f"{file}.txt") for file in _COMMON),
    ]
    return {
        file.removesuffix(".txt"): Template((folder / file).read_text()).substitute(values) for folder, file in found
    }


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Directory to create, and the name of the model.")],
    template: Annotated[ProjectKind, typer.Option("--template", help="What the project serves.")] = ProjectKind.PLAIN,
) -> None:
    """Create a small project in a new directory: a model, its test, settings and a Dockerfile."""
    from weir.serving import check_name

    folder = Path(check_name(name))
    if "/" in name:  # a model's name may have them, and a folder's may not
        raise SettingsError(f"NAME {name!r}: must be of up to 255 letters, digits and . _ ~ -, without a /")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"NAME {name!r}: {folder.absolute()} exists; must be a new or empty directory")
    written = files_of(template, name)
    try:
        folder.mkdir(exist_ok=True)
        for file, text in written.items():
            (folder / file).write_text(text)
    except OSError as error:
        raise SettingsError(f"NAME {name!r}: {folder.absolute()} cannot be written: {error.strerror}") from error
    typer.echo(f"written: {name}/ with {', '.join(written)}\n")
    typer.echo("next:\n" + "\n".join(f"  {line}" for line in _steps(name, template)))


def _steps(name: str, template: ProjectKind) -> list[str]:
    make = _PROJECTS[template].make
    commands = ["pip install -r requirements.txt", *([f"python {make}"] if make else [])]
    return [f"cd {name}", *commands, "pytest", "weir serve --config weir.toml"]
