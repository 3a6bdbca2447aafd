"""`weir worker`: runs a model as an external worker of a server."""

from typing import Any

import typer

from weir.commands.options import parameter, settings_of, settings_parameters, single_model, with_signature
from weir.errors import SettingsError
from weir.messages import JSON
from weir.settings import TRUST, declared_settings

OF_MODEL = [
    each
    for name, each in declared_settings().items()
    if name in ("params", "max_batch_size", "retry_in_halves", *TRUST)
]


def _worker(
    target: str,
    connect: str,
    content_type: str | None = None,
    config: list[str] | None = None,
    **options: list[Any] | None,
) -> None:
    """Attach a model to a server as an external worker, until SIGTERM, SIGINT, SIGQUIT or SIGHUP.

    ADDRESS is the server's --worker-socket. The worker loads and warms up the model, then connects. When the connection is
    lost, it reconnects with a back-off. TARGET is any that `weir serve` takes.
    """
    from weir.catalog.loading import make_service
    from weir.workers.remote import Attachment
    from weir.workers.run.runner import RunnableModel, Runner
    from weir.workers.settings import parse_address

    address = parse_address(connect, "--connect")
    settings = settings_of([target], config, options)
    model = single_model(settings, target)
    service = make_service(model._replace(settings={**model.settings, "executor": "inline", "worker_socket": None}), ())
    if service.facts.takes_tensors or service.facts.streaming:
        raise SettingsError(f"{target}: external workers run models of items only, not tensor or streaming models")
    facts, halves = service.facts, service.workers.retry_in_halves
    runner = Runner(RunnableModel(facts.model, service.params, facts.batching.max_batch_size, halves, service.label), 0)
    runner.start()
    try:
        Attachment(runner, address, content_type or JSON, lambda line: typer.echo(line, err=True)).run()
    finally:
        runner.stop()


worker = with_signature(
    _worker,
    [
        parameter("target", str, typer.Argument(..., metavar="TARGET", help="The model to run.")),
        parameter("connect", str, typer.Option(..., "--connect", metavar="ADDRESS", help="Address of the server's worker socket: unix:PATH or tcp:HOST:PORT.")),
        parameter("content_type", str, typer.Option(None, "--content-type", metavar="TYPE", help=f"Content type of requests and responses (default: {JSON}).")),
        *settings_parameters(OF_MODEL),
    ],
)  # fmt: skip
