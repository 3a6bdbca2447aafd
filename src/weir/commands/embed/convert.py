"""`weir embed convert`: converts a checkpoint of the original BERT to a directory that can be served."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Directory with bert_config.json, vocab.txt and a checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New directory to write.")],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "--ckpt-name", "-ckpt-name", metavar="NAME", help="Checkpoint to convert (default: bert_model.ckpt, or the only one)."),
    ] = None,
    cased: Annotated[
        bool | None,
        typer.Option("--cased/--no-cased", "--cased-tokenization/ ", "-cased-tokenization/ ", help="Distinguish upper and lower case (default: if the vocabulary does)."),
    ] = None,
) -> None:  # fmt: skip
    """Convert a TensorFlow checkpoint of the original BERT to a directory in Hugging Face's layout, without TensorFlow.

    A classifier trained on top is converted too.
    """
    from weir.text_server.bert_as_service.convert import convert as convert_checkpoint

    made = convert_checkpoint(Path(source), Path(target), name=checkpoint, cased=cased)
    typer.echo(f"wrote {made}: weir embed serve {made}")
