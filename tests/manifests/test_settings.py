"""The settings of a server become the command of a container, and what no container can have is refused in one line."""

from pathlib import Path

import pytest
from tests.documentation.pages import ROOT
from tests.manifests.kit import command_of, of_kind, pod_of, printed, refused
from tests.rings import subcases
from tests.served import weir_here

from weir.manifests import OF_KSERVE, OF_KUBERNETES, manifest_settings
from weir.settings import CONFIG, declared_settings
from weir.workers.settings import OF_RAY

TARGET = "models:Square"
ADDED = ["--port=8000", "--host=0.0.0.0", "--log-format=json", "--liveness=models", "--drain-timeout=30"]
# A value for each kind of setting. What a container refuses has tests of its own.
SAMPLES: dict[str, list[str]] = {
    "timeout_status": ["408"], "model_control": ["on-demand"],
    "params": ["depth=3", 'names=["a b", "c"]'], "route": ["/sq", "/square"], "policy": ["size-or-delay:size=32,delay=5ms"], "env": ["A=1", "B=x y"],
    "cpu_affinity": ["0", "1-2"], "server_cpu_affinity": ["0"], "cors_origins": ["*"], "uds_mode": ["660"], "load": ["all"],
    "frontends": ['mine={"port": 1}'], "protocols": ["mine"], "executor": ["external"], "worker_socket": ["unix:/run/weir.sock"], "log_level": ["debug"],
    "trace_endpoint": ["http://localhost:4318"], "host": ["::"], "api_key_file": ["/etc/keys"], "control_token_file": ["/etc/token"],
    "pipeline_depth": ["2"], "liveness": ["process"], "log_format": ["text"], "small_request_size": ["0"], "grpc_port": ["8001"], "workers": ["4"], "device_order": ["oldest"], "ray_address": ["auto"], "ray_runtime_env": ['{"pip": ["a"]}'], "resources": ["A10=1"], "placement": ["spread"],
}  # fmt: skip
REFUSED = {"uds", "api_key"}


def sample_of(name: str) -> list[str]:
    """Return the words of a flag with a value that it takes."""
    declared = declared_settings()[name]
    if declared.is_switch:
        return [f"--no-{declared.flag[2:]}" if declared.default else declared.flag]
    hint = str(declared.hint)
    value = "7" if "int" in hint else "0.5" if "float" in hint else "text"
    return [f"{declared.flag}={each}" for each in SAMPLES.get(name, [value])]


@pytest.mark.parametrize(("kind", "left_out"), [("kubernetes", "allow_control"), ("kserve", "control_token_file")])
def test_every_flag_of_serve_is_handed_on(kind: str, left_out: str) -> None:
    named = declared_settings().keys() - REFUSED - {left_out, *OF_RAY}
    words = [word for name in named for word in sample_of(name)]
    command = command_of(printed(kind, TARGET, *words))
    assert command[0] == "serve" and TARGET in command
    assert sorted(set(command) - {"serve", TARGET}) == sorted(words)  # all is stated, so nothing is added


def test_every_flag_of_ray_is_handed_on() -> None:
    words = ["--executor=ray", *[word for name in OF_RAY for word in sample_of(name)]]
    assert set(words) < set(command_of(printed("kubernetes", TARGET, *words)))


def test_what_a_container_needs_is_added_unless_it_is_stated(tmp_path: Path) -> None:
    assert command_of(printed("kubernetes", TARGET)) == ["serve", TARGET, *ADDED]
    stated = ["--port=9000", "--host=::", "--log-format=text", "--liveness=process", "--drain-timeout=1"]
    assert sorted(command_of(printed("kubernetes", TARGET, *stated))) == sorted(["serve", TARGET, *stated])
    (tmp_path / "weir.toml").write_text(
        'port = 9000\nhost = "::"\nlog_format = "text"\nliveness = "process"\ndrain_timeout = 1\n'
    )
    command = command_of(printed("kubernetes", TARGET, "--config", tmp_path / "weir.toml"))
    assert command == ["serve", TARGET, "--config=/etc/weir/weir.toml"]
    by_variables = {"WEIR_PORT": "9000", "WEIR_LOG_FORMAT": "text", "WEIR_LIVENESS": "process"}
    objects = printed("kubernetes", TARGET, env=by_variables)
    assert command_of(objects) == ["serve", TARGET, "--host=0.0.0.0", "--drain-timeout=30"]
    (container,) = pod_of(objects)["spec"]["containers"]
    assert container["env"] == [{"name": name, "value": value} for name, value in by_variables.items()]
    assert of_kind(objects, "Service")["spec"]["ports"][0]["port"] == 9000


@pytest.mark.parametrize("kind", ["kubernetes", "kserve"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_file_of_settings_goes_along(kind: str, by_variable: bool, tmp_path: Path) -> None:
    text = f'# of all models\nmax_batch_size = 8\n\n[models.square]\ntarget = "{TARGET}"\ndrain_timeout = 90.5\n'
    (tmp_path / "here.toml").write_text(text)
    path = str(tmp_path / "here.toml")
    objects = printed(kind, env={CONFIG: path}) if by_variable else printed(kind, "--config", path)
    assert of_kind(objects, "ConfigMap")["data"] == {"weir.toml": text}
    pod = pod_of(objects)["spec"]
    assert {"name": "config", "configMap": {"name": of_kind(objects, "ConfigMap")["metadata"]["name"]}} in pod[
        "volumes"
    ]
    assert {"name": "config", "mountPath": "/etc/weir"} in pod["containers"][0]["volumeMounts"]
    assert "--config=/etc/weir/weir.toml" in command_of(objects)
    assert pod["terminationGracePeriodSeconds"] == 111  # five before SIGTERM, 90.5 to drain, fifteen to end
    assert not [word for word in command_of(objects) if word.startswith("--drain-timeout")]


def test_a_variable_is_handed_on_unless_a_flag_overrides_it() -> None:
    env = {"WEIR_WORKERS": "3", "WEIR_MAX_BATCH_SIZE": "7"}
    env |= {"WEIR_PORT": "tcp://10.0.0.1:8000", "WEIR_SERVICE_HOST": "10.0.0.1"}  # what Kubernetes sets
    objects = printed("kubernetes", TARGET, "--workers", 2, env=env)
    assert pod_of(objects)["spec"]["containers"][0]["env"] == [{"name": "WEIR_MAX_BATCH_SIZE", "value": "7"}]
    assert "--workers=2" in command_of(objects) and "--port=8000" in command_of(objects)


def test_a_model_repository_from_storage() -> None:
    objects = printed("kserve", "--storage-uri", "s3://bucket/models")
    assert command_of(objects)[-1] == "--model-repository=/mnt/models"
    assert of_kind(objects, "InferenceService")["spec"]["predictor"]["model"]["storageUri"] == "s3://bucket/models"
    assert of_kind(objects, "InferenceService")["metadata"]["name"] == "weir"
    elsewhere = printed("kserve", "--storage-uri", "s3://bucket/models", "--model-repository", "/mnt/models/v2")
    assert command_of(elsewhere)[-1] == "--model-repository=/mnt/models/v2"


def test_no_key_stands_in_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "weir.toml").write_text('api_key = "s3cret"\n')
    for words, env in (
        (["--api-key", "s3cret"], {}), ([], {"WEIR_API_KEY": "s3cret"}), (["--config", tmp_path / "weir.toml"], {}),
    ):  # fmt: skip
        said = refused("kubernetes", TARGET, *words, env=env)
        assert said.startswith("--api-key: ") and "--api-key-secret" in said and "s3cret" not in said


def test_a_key_comes_from_a_secret() -> None:
    objects = printed("kubernetes", TARGET, "--api-key-secret", "keys", "--secret", "tokens", "--monitor")
    (container,) = pod_of(objects)["spec"]["containers"]
    key = {"name": "keys", "key": "api-key"}
    assert container["env"] == [{"name": "WEIR_API_KEY", "valueFrom": {"secretKeyRef": key}}]
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    (endpoint,) = of_kind(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"credentials": key}


@subcases(
    ("words", "says"),
    [
        ([], "nothing to serve: give a TARGET"),
        ([TARGET, "--max-batch-size=0"], "--max-batch-size=0: must be 1 or more"),
        ([TARGET, "--uds=weir.sock"], "--uds='weir.sock': a Service reaches pods by a port"),
        ([TARGET, "--fronts=auto"], "--fronts=auto: a pod sees all CPUs of its node, not those it requests; state a number"),
        ([TARGET, "--host=127.0.0.1"], "--host='127.0.0.1': probes and callers come from outside"),
        ([TARGET, "--host=localhost"], "--host='localhost': probes and callers come from outside"),
        ([TARGET, "--port=0"], "--port=0: a Service has to name the port"),
        ([TARGET, "--grpc-port=0"], "--grpc-port=0: a Service has to name the port"),
        ([TARGET, "--port=8001", "--grpc-port=8001"], "--grpc-port=8001: is the port of HTTP"),
        ([TARGET, "--replicas=0"], "--replicas='0': must be a number from 1 on"),
        ([TARGET, "--replicas=0..3"], "--replicas='0..3': must be a number from 1 on"),
        ([TARGET, "--replicas=4..2"], "--replicas='4..2': must be a number from 1 on"),
        (["a b:C"], "TARGET 'a b:C': must be module:Class or path/file.py:Class"),
        ([TARGET, "--cpu=lots"], "--cpu='lots': must be CPUs"),
        ([TARGET, "--cpu=0"], "--cpu='0': must be CPUs"),
        ([TARGET, "--memory=1GB"], "--memory='1GB': must be bytes"),
        ([TARGET, "--gpus=-1"], "--gpus=-1: must be 0 or more"),
        ([TARGET, "--label=a"], "--label=['a']: must be KEY=VALUE"),
        ([TARGET, "--object-name=Square_2"], "--object-name='Square_2': must be lower-case letters"),
        ([TARGET, "--namespace=-x"], "--namespace='-x': must be lower-case letters"),
        ([TARGET, "--name=日本"], "日本: is not a valid Kubernetes name; set --object-name"),
        ([TARGET, "--target-waiting-rows=5"], "--target-waiting-rows=5: nothing scales without a range, such as --replicas 2..10"),
        ([TARGET, "--replicas=1..2", "--no-metrics"], "--replicas=1..2: needs the metrics that --no-metrics switches off"),
        ([TARGET, "--replicas=1..2"], "--replicas=1..2: KEDA asks Prometheus for metrics of the job 'square', which a PodMonitor collects: add --monitor"),
        ([TARGET, "--num-gpus=1"], "num_gpus=1.0, executor='process': only Ray reads num_gpus; state executor ray"),
        ([TARGET, "--ray-address=auto"], "ray_address='auto', executor='process': only Ray reads ray_address"),
        ([TARGET, "--monitor", "--no-metrics"], "--monitor: needs the metrics that --no-metrics switches off"),
        ([TARGET, "--target-latency=0.1"], "--target-latency=0.1: nothing enforces it"),
        ([TARGET, "--image=b"], "--image: given 2 times (own:1, b); must be given once"),
        ([TARGET, "--toleration=a:Never"], "--toleration=['a:Never']: must be KEY[=VALUE][:EFFECT]"),
        ([TARGET, "--config=no.toml"], "--config=no.toml: cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(words: list[str], says: str) -> None:
    assert refused("kubernetes", *words).startswith(says)


def test_its_own_settings_have_names_of_their_own() -> None:
    assert not manifest_settings(OF_KSERVE).keys() & declared_settings().keys()


@pytest.mark.parametrize("kind", ["kubernetes", "kserve"])
def test_help_shows_what_there_is(kind: str) -> None:
    shown = weir_here("manifest", kind, "--help=all", env={"COLUMNS": "200"})
    assert shown.returncode == 0
    parts = OF_KSERVE if kind == "kserve" else OF_KUBERNETES
    for declared in [*manifest_settings(parts).values(), *declared_settings().values()]:
        assert f"{declared.flag} " in shown.stdout
    assert f"weir manifest {kind} square:Square" in " ".join(shown.stdout.split())
    assert "--storage-uri" not in weir_here("manifest", "kubernetes", "--help", env={"COLUMNS": "200"}).stdout


def test_the_reference_has_every_option_of_its_own() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    section = page[page.index("## weir manifest") :].split("\n## ")[0]
    assert [each.flag for each in manifest_settings().values() if f"`{each.flag}`" not in section] == []


def test_it_needs_no_model_and_says_how_it_was_written() -> None:
    words = ["manifest", "kubernetes", "no.such:Model", "--image=x:1", "--param"]
    done = weir_here(*words, "text=two words")
    head = "# weir manifest kubernetes no.such:Model --image=x:1 --param 'text=two words'"
    assert done.stdout.startswith(f"{head}\napiVersion: v1\n")
    assert weir_here(*words, "text=two\nlines").stdout.startswith("apiVersion: v1\n")
