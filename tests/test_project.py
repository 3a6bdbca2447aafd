"""What an open project has is there, can be read by those that read it, and says what is so."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml
from deploy.image import VARIANTS
from tests.rings import subcases

import weir

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = ROOT / ".github" / "workflows" / "release.yml"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in read(workflow)["jobs"].values() for step in job["steps"]]


def test_each_file_of_github_satisfies_its_published_schema() -> None:
    from check_jsonschema.builtin_schemas import get_builtin_schema
    from jsonschema import Draft7Validator

    github = ROOT / ".github"
    kinds = {
        "github-workflows": WORKFLOWS, "dependabot": [github / "dependabot.yml"],
        "github-issue-config": [github / "ISSUE_TEMPLATE" / "config.yml"],
        "github-issue-forms": sorted(set((github / "ISSUE_TEMPLATE").glob("*.yml")) - {github / "ISSUE_TEMPLATE" / "config.yml"}),
        "citation-file-format": [ROOT / "CITATION.cff"],
    }  # fmt: skip
    for kind, paths in kinds.items():
        schema = Draft7Validator(get_builtin_schema(f"vendor.{kind}"))
        for path in paths:
            # Keys such as `on` and dates are texts for those who read these files.
            document = (
                yaml.load(path.read_text(), yaml.BaseLoader) if kind == "citation-file-format" else _as_github(path)
            )
            assert [f"{error.json_path}: {error.message[:200]}" for error in schema.iter_errors(document)] == [], path


def _as_github(path: Path) -> Any:
    """Return the document as YAML 1.2 has it: `on` is a text there."""
    return {"on" if key is True else key: value for key, value in read(path).items()}


def test_each_target_of_make_that_is_named_exists() -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for path in [*WORKFLOWS, ROOT / "CONTRIBUTING.md", ROOT / ".pre-commit-config.yaml"]
        for target in re.findall(r"\bmake ([a-z][\w-]*)", path.read_text())
    }
    matrix = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["more"]["strategy"]["matrix"]["target"]
    assert named | set(matrix) <= rules
    assert {"check", "test", "wheel", *matrix} <= named | set(matrix)


def made(*words: str) -> list[str]:
    """Return the words of the last command that `make` would run."""
    # The make that runs the tests has flags of its own, and passes them on.
    plain = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CHECKED")
    }
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    return shlex.split(done.stdout.replace("\\\n", " ").splitlines()[-1])


def test_what_make_check_runs_is_left_out_of_make_test_in_ci_alone() -> None:
    covered = {word for word in made("covered") if word.startswith("tests/")}
    assert covered == {"tests/policy", "tests/batching"}
    assert not [word for word in made("test") if word.startswith(("--ignore", "--deselect"))]
    assert {f"--ignore={folder}" for folder in covered} < set(made("test", "CHECKED=1"))
    run = (ROOT / ".ci" / "run").read_text()
    assert all(f" {target} " in run for target in ("check", "test CHECKED=1"))


def test_make_image_takes_versions_as_they_are_written() -> None:
    words = made("image", 'WITH=b;python_version>"3" c>=1', "MODELS=my models")
    assert words[words.index("--with") :] == ["--with", 'b;python_version>"3"', "c>=1", "--models", "my models"]


def test_the_pythons_of_the_workflows_are_those_that_are_declared() -> None:
    declared = [
        found[1] for line in PROJECT["classifiers"] if (found := re.search(r"Python :: (\d+\.\d+)$", line)) is not None
    ]
    for workflow, job in (("ci.yml", "test"), ("release.yml", "try")):
        matrix = read(ROOT / ".github" / "workflows" / workflow)["jobs"][job]["strategy"]["matrix"]
        assert [python for python in matrix["python"] if python.count(".") == 1] == declared  # others are patches
    assert PROJECT["requires-python"] == f">={declared[0]}"
    promised = f"Python {declared[0]} to {declared[-1]}"
    for page in ("CONTRIBUTING.md", "docs/reference/stability.md"):
        assert promised in (ROOT / page).read_text(), page


def test_only_jobs_that_publish_may_write_and_they_have_no_secret() -> None:
    provenance, registry = {"id-token": "write", "attestations": "write"}, {"id-token": "write", "packages": "write"}
    published = {"publish": provenance, "publish-containers": {**provenance, **registry}, "publish-chart": registry}
    for workflow in WORKFLOWS:
        assert read(workflow)["permissions"] == {"contents": "read"}
        assert "secrets." not in workflow.read_text()
        used = [step["uses"] for step in steps(workflow) if "uses" in step]
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each) for each in used)  # a tag may be moved
        may = {name: job["permissions"] for name, job in read(workflow)["jobs"].items() if "permissions" in job}
        assert may == (published if workflow.name == "release.yml" else {})
    jobs = read(RELEASE)["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "build": None, "try": "build", "publish": ["image", "try"], "image": "build", "publish-containers": ["image", "try"], "publish-chart": "publish-containers",
    }  # fmt: skip
    assert any("pypi-publish" in step.get("uses", "") for step in jobs["publish"]["steps"])
    for name in ("publish", "publish-containers"):
        assert any("/attest-build-provenance@" in step.get("uses", "") for step in jobs[name]["steps"])
    checkouts = [step for job in jobs.values() for step in job["steps"] if "/checkout@" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_the_wheel_is_tried_with_extras_that_exist() -> None:
    extras = {"none", *PROJECT["optional-dependencies"]}
    for workflow in WORKFLOWS:
        for step in steps(workflow):
            found = re.search(r'EXTRAS="([^"]+)"|wheel\.py --wheel \S+ (.+)', step.get("run", ""))
            if found is not None:
                assert set((found[1] or found[2]).split()) <= extras


def test_the_tag_of_a_release_is_compared_with_the_version_that_is_there() -> None:
    (line,) = [step["run"] for step in steps(RELEASE) if "_version" in step.get("run", "")]
    assert "src/weir/_version.py" in line
    assert f'__version__ = "{weir.__version__}"' in (ROOT / "src" / "weir" / "_version.py").read_text()
    assert read(ROOT / "CITATION.cff")["version"] == weir.__version__


def test_a_release_is_built_with_versions_that_are_pinned() -> None:
    (build,) = (step for step in steps(RELEASE) if "python -m build" in step.get("run", ""))
    assert build["env"]["PIP_CONSTRAINT"].endswith("/lock.txt")
    locked = {line.partition("==")[0] for line in (ROOT / "lock.txt").read_text().splitlines()}
    assert {"build", "hatchling", "pathspec", "pyproject_hooks", "trove-classifiers"} <= locked


def test_every_image_that_can_be_built_is_published() -> None:
    jobs = read(RELEASE)["jobs"]
    built = [name for each in jobs["image"]["strategy"]["matrix"]["include"] for name in each["variants"].split()]
    assert built == jobs["publish-containers"]["strategy"]["matrix"]["variant"] == list(VARIANTS)


@subcases(
    ("tag", "version"),
    [("v0.2.0", "0.2.0"), ("v0.2.0rc1", "0.2.0-rc.1"), ("v1.0.0a12", "1.0.0-a.12"), ("v1.0.0.dev3", "1.0.0-dev.3")],
)
def test_the_chart_of_a_release_has_a_semantic_version(tag: str, version: str) -> None:
    (script,) = (step["run"] for step in steps(RELEASE) if "helm package" in step.get("run", ""))
    line, *_ = (line for line in script.splitlines() if line.startswith("version="))
    words = ["bash", "-c", f'{line}\necho "$version"']
    made = subprocess.run(words, env={**os.environ, "GITHUB_REF_NAME": tag}, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == version


GROUPS = ("weir.platforms", "weir.protocols", "weir.frontends", "weir.policies", "weir.executors", "weir.adapters")


def test_what_the_stability_page_calls_public_can_be_imported() -> None:
    page = (ROOT / "docs" / "reference" / "stability.md").read_text()
    for name in re.findall(r"`(weir(?:\.[a-z]+)?)`", page):
        if name not in GROUPS:
            __import__(name)
    for group in GROUPS:
        assert group in page
