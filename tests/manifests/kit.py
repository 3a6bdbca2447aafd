"""Manifests as `weir manifest` prints them, read by a YAML library."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tests.documentation.pages import ROOT
from tests.served import weir_here

Object = dict[str, Any]


def printed(kind: str, *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> list[Object]:
    """Return the objects that `weir manifest` prints."""
    done = weir_here("manifest", kind, "--image=own:1", *words, env=dict(env or {}), cwd=cwd)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return list(yaml.safe_load_all(done.stdout))


def refused(kind: str, *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Return the one line by which `weir manifest` refuses `words`."""
    done = weir_here("manifest", kind, "--image=own:1", *words, env=dict(env or {}), cwd=cwd)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count(os.linesep) == 1 and done.stderr.startswith("weir: ")
    return done.stderr.removeprefix("weir: ").rstrip()


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
