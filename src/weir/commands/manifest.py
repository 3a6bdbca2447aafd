"""`weir manifest`: prints the objects that serve models on Kubernetes."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from weir.commands.options import (
    Command,
    CommandGroup,
    only,
    paragraphs,
    parameter,
    settings_parameters,
    text_of,
    with_signature,
)
from weir.manifests import OF_KSERVE, OF_KUBERNETES, manifest_settings
from weir.settings import declared_settings
from weir.text_server.server_settings import TEXT_VARIABLES

if TYPE_CHECKING:
    from weir.manifests import Manifest

manifest = typer.Typer(
    cls=CommandGroup,
    help="Print Kubernetes manifests that serve models with the settings of weir serve.",
    no_args_is_help=True,
)

_EPILOG = (
    "The options of the server are those of weir serve, also as a file and variables, and are handed on to the containers; "
    "those of Kubernetes are options only. Example: weir manifest {} | kubectl apply -f -"
)


def _kubernetes(manifest: "Manifest") -> list[dict[str, Any]]:
    """Print a Deployment, a Service, a PodDisruptionBudget, and their autoscaling and monitoring.

    With --replicas 2..10, KEDA chooses the number of pods by the queue length. With --monitor, the Prometheus Operator
    collects metrics and alerts.
    """
    from weir.manifests.kubernetes import kubernetes

    return kubernetes(manifest)


def _kserve(manifest: "Manifest") -> list[dict[str, Any]]:
    """Print a ServingRuntime and an InferenceService of protocol v2.

    The InferenceService has the name of the model, or that of --object-name. KServe runs it as a Deployment (its mode
    Standard, called RawDeployment before 0.16). --replicas 2..10 needs KEDA.
    """
    from weir.manifests.kubernetes import kserve

    return kserve(manifest)


class _Kind(NamedTuple):
    """A kind of manifest: what makes the objects, the headings of its settings, the default port, and an example."""

    make: Callable[["Manifest"], list[dict[str, Any]]]
    parts: Mapping[str, type[Any]]
    port: int
    example: str


_KINDS = {
    "kubernetes": _Kind(
        _kubernetes, OF_KUBERNETES, 8000, "square:Square --image registry/square:1 --replicas 2..10 --monitor"
    ),
    # The port is where KServe expects a model server.
    "kserve": _Kind(_kserve, OF_KSERVE, 8080, "square:Square --image registry/square:1 --max-batch-size 32"),
}


def _printing(kind: _Kind) -> Callable[..., None]:
    """Return the command that prints the objects of `kind`."""

    def command(targets: list[str] | None, config: list[str] | None, **options: list[Any] | None) -> None:
        from weir.manifests import read_command, read_manifest
        from weir.manifests.kubernetes import documents

        texts = {name: [text_of(value) for value in values] for name, values in options.items() if values}
        own = {name: texts.pop(name) for name in manifest_settings(kind.parts) if name in texts}
        if "storage_uri" in own and not targets:
            texts.setdefault("model_repository", ["/mnt/models"])  # where KServe puts it
        read = read_command(targets or [], texts, os.environ, only(config), kind.port, ignored=TEXT_VARIABLES)
        objects = kind.make(read_manifest(read, own))
        written = f"# weir {shlex.join(sys.argv[1:])}\n"  # by which it can be made again
        typer.echo((written if written[:-1].isprintable() else "") + documents(objects), nl=False)

    return command


for _name, _kind in _KINDS.items():
    _declared = [*manifest_settings(_kind.parts).values(), *declared_settings().values()]
    _targets = parameter("targets", list[str], typer.Argument(None, metavar="TARGET...", help="The models to serve."))
    _command = with_signature(_printing(_kind), [_targets, *settings_parameters(_declared)])
    manifest.command(
        _name, cls=Command, help=paragraphs(_kind.make), epilog=_EPILOG.format(f"{_name} {_kind.example}")
    )(_command)
