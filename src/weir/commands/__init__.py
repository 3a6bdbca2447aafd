"""The subcommands of `weir` except serve and check. Each has a module of its name with a function of that name.

The modules are imported for every `weir --help`, so a function imports the libraries that it needs only when it is called.
"""

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {  # an example of each command, by name
    "new": "weir new mood --template sklearn",
    "profile": "weir profile square:Square -o square.profile.toml",
    "solve": "weir solve square.profile.toml --latency-weight 1 --energy-weight 1 --reference-rate 200 -o square.policy.npz",
    "simulate": "weir simulate square.profile.toml --policy smdp,greedy,size-or-delay:size=32,delay=5ms --arrivals poisson:0.7",
    "worker": "weir worker square:Square --connect unix:/run/weir/square.sock",
    "embed": "weir embed serve ./bge-small-en --workers 2",
    "batch": "weir batch run reviews.jsonl ./bge-small-en -o vectors.jsonl",
    "bench": "weir bench http://localhost:8000/infer/square --arrivals poisson --rate 500 --duration 30",
}
