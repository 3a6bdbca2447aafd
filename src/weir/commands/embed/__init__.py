"""`weir embed`: the vectors of texts. One module for each subcommand, named like it, with a function of that name."""

import typer

from weir.commands.embed.bert_flags import StockCommand
from weir.commands.options import register

COMMANDS = {  # each with an example
    "serve": "weir embed serve ./bge-small-en --pooling cls --max-length 512 --workers 2 --zmq-port 5555",
    "benchmark": "weir embed benchmark ./bge-small-en --client-batch 1,64,1024 -- --workers 2",
    "convert": "weir embed convert ./uncased_L-12_H-768_A-12 ./bert-base-uncased",
    "layers": "weir embed layers reviews.tsv --model ./bert-base-uncased -o layers.png",
    "search": "weir embed search questions.txt 'how do I get my money back?' --top 5",
    "terminate": "weir embed terminate --ip localhost --port 5555",
}

embed = typer.Typer(
    help="Turn texts into vectors: serve a model of texts, and what belongs to that.", no_args_is_help=True,
    # The flags of bert-serving-start have underscores.
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)  # fmt: skip
register(embed, COMMANDS, "weir.commands.embed", StockCommand)
