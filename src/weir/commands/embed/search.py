"""`weir embed search`: finds the texts of a file that are nearest to a query."""

from pathlib import Path
from typing import Annotated

import typer

from weir.errors import SettingsError


def search(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Texts: one per line, .jsonl, .csv or .tsv.")],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The text to look for.")],
    model: Annotated[
        str | None,
        typer.Option(help="The model's directory, or its id such as BAAI/bge-small-en-v1.5 (default: the small one)."),
    ] = None,
    top: Annotated[int, typer.Option("--top", "-n", help="Number of texts to print.", min=1)] = 10,
    max_length: Annotated[int | None, typer.Option(help="Maximum number of tokens per text.", min=4)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, an object per line.")] = False,
) -> None:
    """Find the texts in a file that are most similar to a query; print their cosine similarity and line."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from weir.commands.embed import bar, directory_of
    from weir.text_models.offline import read_labelled
    from weir.text_models.offline import search as nearest

    if not query:
        raise SettingsError("QUERY: is empty, must be a text")
    texts = read_labelled(file, labels=False).texts
    with bar("encoding") as progress:
        hits = nearest(directory_of(model), texts, query, top, progress, max_length=max_length)
    if json:
        for hit in hits:
            typer.echo(msgspec.json.encode(hit._asdict()).decode())
        return
    table = Table("cosine", "place", "text", box=None)
    for hit in hits:
        table.add_row(f"{hit.similarity:.3f}", str(hit.place), " ".join(hit.text.split()))
    Console(highlight=False, markup=False).print(table)
