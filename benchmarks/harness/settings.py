"""What peers' own documentation names as their fast modes: in addition to the defaults, with which they are measured too."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple


class Fast(NamedTuple):
    """A row of its own. `given` goes to the peer's program as JSON in SETTINGS, `variables` into its environment."""

    peer: str  # the row with its defaults
    said: str  # on the page
    given: dict[str, Any] | None = None
    variables: dict[str, str] | None = None

    def environment(self) -> list[str]:
        """Return the words before a command that set this."""
        more = {} if self.given is None else {"SETTINGS": json.dumps(self.given)}
        return ["env", *(f"{name}={value}" for name, value in (more | (self.variables or {})).items())]


OPTIMIZED = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}  # includes direct ingress, and gRPC between replicas
HAPROXY = {**OPTIMIZED, "RAY_SERVE_ENABLE_HA_PROXY": "1"}

FAST = {
    "mosec, 1 ms": Fast("mosec", "`max_wait_time=1`", {"max_wait_time": 1}),
    "mosec, 2 workers": Fast(
        "mosec", "`num=2, max_wait_time=1, max_batch_size=32`", {"num": 2, "max_wait_time": 1, "max_batch_size": 32}
    ),
    "LitServe, fast": Fast(
        "LitServe",
        "`fast_queue=True, workers_per_device=2` and so two API servers",
        {"fast_queue": True, "workers_per_device": 2},
    ),
    "BentoML, fast": Fast(
        "BentoML",
        "`workers=2`, an async method, without metrics and access log",
        {"workers": 2, "metrics": {"enabled": False}, "logging": {"access": {"enabled": False}}},
    ),
    "Ray Serve, direct": Fast(
        "Ray Serve",
        "`RAY_SERVE_THROUGHPUT_OPTIMIZED=1`, and the replica is asked without a proxy",
        variables=OPTIMIZED
        | {"RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "{port}", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": "65535"},
    ),
    "Ray Serve, HAProxy": Fast(
        "Ray Serve", "`RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_ENABLE_HA_PROXY=1`", variables=HAPROXY
    ),
    "Triton, 2 instances": Fast("Triton", "`instance_group` with `count: 2`", {"instances": 2}),
    "MLServer, no workers": Fast(
        "MLServer",
        "`parallel_workers=0`: models run in the server itself",
        variables={"MLSERVER_PARALLEL_WORKERS": "0"},
    ),
    "infinity_emb, optimum": Fast("infinity_emb", "`--engine optimum`, an ONNX graph"),
}


def ways(peer: str) -> list[str]:
    """Return the rows of a peer: that with its defaults, and the fast ones."""
    return [peer, *(name for name, fast in FAST.items() if fast.peer == peer)]


def described(names: Iterable[str]) -> str:
    """Say with which settings these rows run."""
    return "; ".join(f"{name}: {FAST[name].said}" for name in names if name in FAST) + "."
