"""`weir embed layers`: shows how well each layer of a model separates labelled texts."""

from pathlib import Path
from typing import Annotated

import typer

_FILE = "Labelled texts: .jsonl with text and label, .csv or .tsv with these columns, or lines of label, tab, text."


def layers(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=_FILE)],
    model: Annotated[
        str | None,
        typer.Option(help="The model's directory, or its id such as BAAI/bge-small-en-v1.5 (default: the small one)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to draw the figure to, as .png and .svg (default: layers.png, if matplotlib is installed).",
        ),
    ] = None,
    pooling: Annotated[str, typer.Option(help="Pooling in the figure: mean, max or cls. The table has all.")] = "mean",
    max_length: Annotated[int | None, typer.Option(help="Maximum number of tokens per text.", min=4)] = None,
    neighbours: Annotated[int, typer.Option(help="Nearest neighbours that vote on a text's label.", min=1)] = 5,
    json: Annotated[Path | None, typer.Option(help="File to write the table to as JSON; - prints it.")] = None,
) -> None:
    """Show how well each layer of a model separates labelled texts, as a figure with a panel per layer and a table.

    A panel plots the two directions in which the layer's vectors differ most (PCA). In the table, kNN accuracy is the
    share of texts whose nearest neighbours mostly have the same label. Silhouette, from -1 to 1, measures how much closer
    texts are to their own class than to the next one. Both use cosine distance.
    """
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from weir.commands.embed import bar, directory_of
    from weir.commands.options import STDOUT, can_draw, check_results, print_table, write_atomically
    from weir.text_models.offline import as_dict, draw, read_labelled, study_layers, table

    texts, labels = read_labelled(file)
    picture = output or (Path("layers.png") if can_draw() else None)
    check_results(json, figure=picture, option="--output")
    with bar("encoding") as progress:
        found = study_layers(
            directory_of(model), texts, labels, neighbours=neighbours, progress=progress, max_length=max_length
        )
    if picture is not None:
        draw(found, picture, pooling)
    content = msgspec.json.format(msgspec.json.encode(as_dict(found)), indent=2).decode() + "\n"
    if json is not None and json != STDOUT:
        write_atomically(json, content)
    if json == STDOUT:
        typer.echo(content, nl=False)
        return
    columns, *lines = table(found)
    shown = Table(*columns)
    for line in lines:
        shown.add_row(*line)
    console = Console(highlight=False)
    print_table(console, shown)
    console.print(
        "No picture: it needs matplotlib: pip install 'weir-serving[plots]'"
        if picture is None
        else f"Written: {picture}",
        markup=False,
        soft_wrap=True,
    )
