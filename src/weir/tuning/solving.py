"""The process that solves banks of tables beside a server: `python -m weir.tuning.solving PARENT`.

Its standard input and output are a socket. It reads wishes as JSON and writes for each the bytes of a bank file, or, with
the code REFUSED, the reason why there is none. It ends with the thread that started it, and gives way to the server and its
workers.
"""

import json
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.errors import SettingsError
from weir.workers.process import die_with

if TYPE_CHECKING:
    from weir.policy.cost.objective import LatencySLO, Prices
    from weir.policy.cost.profile import Profile


REFUSED = 2  # the wish cannot be fulfilled, and the answer says why
REQUEST = struct.Struct(">Q")  # before a wish: its length
ANSWER = struct.Struct(">BQ")  # before an answer: 0 or REFUSED, and its length


class SolveRequest(NamedTuple):
    """What a bank is to be solved for."""

    profile: "Profile"
    prices: "Prices"
    workers: int
    objective: "LatencySLO | None"

    def to_json(self) -> bytes:
        """Return the request for a solving process."""
        profile, prices = self.profile, self.prices
        tables = {name: getattr(profile, name).tolist() for name in ("service_time_ms", "energy_mj", "cv")}
        scalars = {name: getattr(profile, name) for name in ("latency_offset_ms", "pipeline_depth", "energy_source")}
        document = {
            "profile": {**tables, **scalars, "about": dict(profile.about)},
            "prices": [prices.latency_weight, prices.energy_weight, prices.reference_rate],
            "workers": self.workers,
            "objective": self.objective,
        }
        return json.dumps(document, default=str).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "SolveRequest":
        """Return the wish that `to_json` wrote. Raises SettingsError for values that cannot be."""
        from weir.policy.cost.objective import LatencySLO, Prices
        from weir.policy.cost.profile import Profile

        document: dict[str, Any] = json.loads(text)
        objective = document["objective"]
        return cls(
            Profile(**document["profile"]),
            Prices(*document["prices"]),
            document["workers"],
            None if objective is None else LatencySLO(*objective).checked(),
        )


def main(parent: int, niceness: int) -> int:
    """Be the solving process of the process `parent`, to its end. Returns the exit code."""
    os.nice(niceness)
    die_with(parent)
    end = socket.socket(fileno=os.dup(0))
    with end, end.makefile("rb") as wishes:
        while head := wishes.read(REQUEST.size):
            code, text = solve(wishes.read(*REQUEST.unpack(head)))
            end.sendall(ANSWER.pack(code, len(text)) + text)
    return 0


def solve(request: bytes) -> tuple[int, bytes]:
    """Return the code of the answer to `request`, and the answer."""
    from weir.simulation.banks import make_bank

    try:
        wish = SolveRequest.from_json(request)
        bank = make_bank(wish.profile, wish.prices, workers=wish.workers, objective=wish.objective)
    except SettingsError as error:
        return REFUSED, error.message.encode()
    return 0, bank.to_bytes()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
