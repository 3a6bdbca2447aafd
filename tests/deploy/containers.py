"""Starts what the container of a pod runs, as a process of this machine."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from tests.deploy.kit import Object, command_of, pod_of
from tests.served import CLEAN, children_of, still_running


class Container:
    """The process of a container. After `with`, it and its workers are gone.

    Args:
        objects: those of which it is a part.
        folder: the working directory, in which its targets are.
    """

    def __init__(self, objects: list[Object], folder: Path) -> None:
        self.pod = pod_of(objects)["spec"]
        (self.spec,) = self.pod["containers"]
        variables = {each["name"]: each["value"] for each in self.spec.get("env", ())}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weir", *command_of(objects)], cwd=folder, env={**CLEAN, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.ports = {each["name"]: each["containerPort"] for each in self.spec["ports"]}
        self.log: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = children_of(self.process.pid)
        self.process.kill()
        self.process.communicate()
        assert not still_running(children)

    def until(self, event: str) -> dict[str, Any]:
        """Read the log, which the chart asks to be JSON, up to a line whose event has this text, and return the line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line))
            if event in self.log[-1]["event"]:
                return self.log[-1]
        raise AssertionError(f"it never logged {event!r}: {self.log}")

    def probe(self, name: str) -> httpx.Response:
        """Ask what the probe `name` asks."""
        asked = self.spec[name]["httpGet"]
        url = f"{asked['scheme'].lower()}://127.0.0.1:{self.ports.get(asked['port'], asked['port'])}{asked['path']}"
        return httpx.get(url, timeout=self.spec[name]["timeoutSeconds"])

    def terminate(self) -> int:
        """End it as Kubernetes does, after the preStop, and return the exit code. Raises an error if it would have been killed."""
        before = int(self.spec["lifecycle"]["preStop"]["exec"]["command"][-1])
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.pod["terminationGracePeriodSeconds"] - before)
