"""The subcommands of `weir` beside serve and check: one module each, named like it, with a function of that name.

The modules are imported for every `weir --help`, so what a command needs is imported inside its function.
"""

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {  # each with an example
    "profile": "weir profile square:Square -o square.profile.toml",
    "solve": "weir solve square.profile.toml --latency-weight 1 --energy-weight 1 --reference-rate 200 -o square.policy.npz",
    "simulate": "weir simulate square.profile.toml --policy smdp,greedy,size-or-delay:size=32,delay=5ms --arrivals poisson:0.7",
    "reproduce": "weir reproduce smdp",
    "worker": "weir worker square:Square --connect unix:/run/weir/square.sock",
    "embed": "weir embed serve ./bge-small-en --workers 2",
    "bench": "weir bench http://localhost:8000/infer/square --arrivals poisson --rate 500 --duration 30",
}
