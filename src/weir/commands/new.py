"""`weir new`: writes a small project, with a model, a test of it, settings and a Dockerfile."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from weir.errors import SettingsError

IMAGE = "weir"  # what the project's own Dockerfile builds
REPOSITORY = "https://github.com/weir-serving/weir"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI has torch with CUDA


class ProjectKind(StrEnum):
    """What a new project serves."""

    PLAIN = "plain"
    SKLEARN = "sklearn"
    TORCH = "torch"
    ONNX = "onnx"
    HF = "hf"
    STREAM = "stream"


class _Project(NamedTuple):
    """The files of a template by name, in which {name} stands for the project's name.

    `target` is what is served, `extras` are Weir's extras, `more` are other requirements, and `make` is a program that is run once
    before the model is served.
    """

    files: Mapping[str, str]
    target: str
    extras: str = "client"
    more: tuple[str, ...] = ()
    make: str = ""


_PLAIN = '''"""The model: replace `predict`."""

import weir


class Lengths(weir.Model):
    """Counts the letters of texts."""

    Input = str
    examples = (weir.Example("weir", 4),)

    def load(self):
        """Load weights here: each worker calls this once."""

    def predict(self, batch):
        """Take a list of items, and return a list of as many answers."""
        return [len(text) for text in batch]
'''

_TORCH = '''"""The model: a network of torch, which gets batches of tensors."""

import torch
import weir


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x).softmax(dim=-1)


class Classifier(weir.Model):
    inputs = (weir.Tensor("x", "FP32", (-1, 4)),)
    outputs = (weir.Tensor("likely", "FP32", (-1, 3)),)
    examples = ({"x": [[5.1, 3.5, 1.4, 0.2]]},)

    def __init__(self, device="auto"):
        self.device = device

    def load(self):
        self.device = self.torch_device(self.device)  # the workers share the GPUs that there are
        torch.manual_seed(0)
        network = Network()  # then: network.load_state_dict(torch.load("weights.pt", weights_only=True))
        self.network = network.to(self.device).eval()

    @torch.inference_mode()
    def predict(self, batch):
        x = torch.tensor(batch["x"], device=self.device)
        return {"likely": self.network(x).cpu().numpy()}
'''

_STREAM = '''"""The model: it answers bit by bit, here with the words of a text."""

import weir


class Words(weir.Model):
    streaming = True
    Input = str
    examples = ("it flows over",)

    def predict(self, batch):
        """Yield the next answers by index of the item, until no item has one."""
        texts = [text.split() for text in batch]
        for place in range(max(map(len, texts))):
            yield {index: words[place] for index, words in enumerate(texts) if place < len(words)}
'''

_TRAIN = '''"""Trains the model and writes it to model.skops. Put your own data here."""

import skops.io
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

rows, kinds = load_iris(return_X_y=True)
estimator = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, kinds)
skops.io.dump(estimator, "model.skops")
'''

_EXPORT = '''"""Writes model.onnx. Put the export of your own network here, such as torch.onnx.export."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

weights = numpy_helper.from_array(np.eye(4, 3, dtype=np.float32), "weights")
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "weights"], ["scores"]), helper.make_node("Softmax", ["scores"], ["likely"])],
    "classifier",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4])],
    [helper.make_tensor_value_info("likely", TensorProto.FLOAT, ["rows", 3])],
    [weights],
)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "model.onnx")
'''

_TEST = '''"""The model is served, and answers. Run it with pytest."""

import weir
from weir.client import HttpClient


def test_it_answers():
    with weir.running(config="weir.toml", workers=1) as server, HttpClient(server.address) as client:
{check}
'''

_ARRAYS = """        x = np.asarray([[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]], np.float32)
        both = client.infer("{name}", {{"x": x}})["likely"]
        one = client.infer("{name}", {{"x": x[:1]}})["likely"]
        np.testing.assert_allclose(both.sum(axis=1), 1.0, rtol=1e-5)
        np.testing.assert_allclose(both[:1], one, rtol=1e-5)  # in a batch as alone"""


def _test(check: str) -> str:
    text = _TEST.replace("{check}", check)
    return text.replace("import weir\n", "import numpy as np\nimport weir\n", 1) if "np." in check else text


# Served by its id, so that the project has no file of a model; a folder with one may take the id's place.
_HUGGING_FACE = "hf:text-classification=distilbert/distilbert-base-uncased-finetuned-sst-2-english"

_PROJECTS: Mapping[ProjectKind, _Project] = {
    ProjectKind.PLAIN: _Project(
        {"model.py": _PLAIN, "test_model.py": _test('        assert client.infer("{name}", "weir") == 4')},
        "model.py:Lengths",
    ),
    ProjectKind.SKLEARN: _Project(
        {
            "train.py": _TRAIN,
            "test_model.py": _test('        assert client.infer("{name}", [5.1, 3.5, 1.4, 0.2]) == 0'),
        },
        "model.skops",
        "client,sklearn",
        make="train.py",
    ),
    ProjectKind.TORCH: _Project(
        {"model.py": _TORCH, "test_model.py": _test(_ARRAYS)}, "model.py:Classifier", more=("torch",)
    ),
    ProjectKind.ONNX: _Project(
        {"export.py": _EXPORT, "test_model.py": _test(_ARRAYS)}, "model.onnx", "client,onnx", ("onnx",), "export.py"
    ),
    ProjectKind.HF: _Project(
        {
            "test_model.py": _test(
                '        answer = client.infer("{name}", "It is easy to begin.")\n'
                '        assert isinstance(answer["label"], str) and 0 < answer["score"] <= 1\n'
                '        assert client.infer("{name}", {{"text": "It is easy to begin."}}) == answer'
            )
        },
        _HUGGING_FACE,
        "client,transformers",
        ("torch",),
    ),
    ProjectKind.STREAM: _Project(
        {
            "model.py": _STREAM,
            "test_model.py": _test(
                '        answers = list(client.stream("{name}", "it flows over"))\n'
                '        assert answers == ["it", "flows", "over"]'
            ),
        },
        "model.py:Words",
    ),
}

_SETTINGS = """# `weir serve --config weir.toml`; each key is also a flag: weir serve --help
max_batch_size = 32

[models."{name}"]
target = "{target}"
"""

# pip finds Weir installed, wherever it came from. An environment without it has nothing to find until there is a release.
_REQUIREMENTS = f"""# Without Weir: pip install "weir-serving[{{extras}}] @ git+{REPOSITORY}"
weir-serving[{{extras}}]
"""
_CPU = f"--extra-index-url {CPU_INDEX}"
_FOR_GPUS = (
    "# torch for the CPU; for a GPU, delete the --extra-index-url: PyPI's torch brings CUDA, several gigabytes\n"
)

_DOCKERFILE = f"""# docker build -t {IMAGE} {REPOSITORY}.git  # the image of Weir, once; or from a checkout of it
# docker build -t {{name}} . && docker run --init -p 8000:8000 {{name}}
FROM {IMAGE}
USER root
WORKDIR /srv/model
{{install}}COPY . .
{{make}}USER weir
CMD ["--config", "weir.toml"]
"""
_README = f"""# {{name}}

```sh
pip install -r requirements.txt
{{make}}pytest
weir serve --config weir.toml
```
{{torch}}
`Dockerfile` serves it in a container, in an image that starts from Weir's own:

```sh
docker build -t {IMAGE} {REPOSITORY}.git  # once; or from a checkout of Weir
docker build -t {{name}} . && docker run --init -p 8000:8000 {{name}}
```
"""
_TORCH_IN_README = f"""
`requirements.txt` and `Dockerfile` install torch for the CPU, from {CPU_INDEX}.
For a GPU, delete the `--extra-index-url` in both: PyPI's torch brings CUDA, several gigabytes.
"""


def files_of(template: ProjectKind, name: str) -> dict[str, str]:
    """Return the content of each file of a new project, by its name."""
    project = _PROJECTS[template]
    torch = "torch" in project.more
    required = [_REQUIREMENTS.format(extras=project.extras), *(f"{each}\n" for each in (*project.more, "pytest"))]
    run = f"python {project.make}\n" if project.make else ""
    # The image has Weir, and pip adds what an extra needs. What only tests need stays out.
    extras = [extra for extra in project.extras.split(",") if extra != "client"]
    inside = [*([f'"weir-serving[{",".join(extras)}]"'] if extras else []), *project.more, *([_CPU] if torch else [])]
    install = f"RUN pip install --no-cache-dir {' '.join(inside)}\n" if inside else ""
    own = {
        file: text.replace("{name}", name).replace("{{", "{").replace("}}", "}") for file, text in project.files.items()
    }
    return {
        **own,
        "weir.toml": _SETTINGS.format(name=name, target=project.target),
        "requirements.txt": "".join([*([_FOR_GPUS, f"{_CPU}\n"] if torch else []), *required]),
        "Dockerfile": _DOCKERFILE.format(
            name=name, make=f"RUN {run}" if run else "", install=(_FOR_GPUS if torch else "") + install
        ),
        "README.md": _README.format(name=name, make=run, torch=_TORCH_IN_README if torch else ""),
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
    files = files_of(template, name)
    try:
        folder.mkdir(exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    except OSError as error:
        raise SettingsError(f"NAME {name!r}: {folder.absolute()} cannot be written: {error.strerror}") from error
    typer.echo(f"written: {name}/ with {', '.join(files)}\n")
    typer.echo("next:\n" + "\n".join(f"  {line}" for line in _steps(name, template)))


def _steps(name: str, template: ProjectKind) -> list[str]:
    make = _PROJECTS[template].make
    commands = ["pip install -r requirements.txt", *([f"python {make}"] if make else [])]
    return [f"cd {name}", *commands, "pytest", "weir serve --config weir.toml"]
