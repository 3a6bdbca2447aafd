"""The style of our figures, which are readable without colour and written as PNG and SVG."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image  # matplotlib also needs it

INK, GREY = "#30363d", "#c9ced6"
# Each line differs from the others in dash and marker as well as in colour and lightness.
COLOURS = ("#0b3c5d", "#d1603d", "#328e6e", "#8a5a9e", "#b8860b", "#5c6770")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
_PALETTE = 64  # colours of a PNG
MARKERS = ("o", "s", "^", "D", "v", "x")


def styles() -> Iterator[dict[str, Any]]:
    """Yield keyword arguments of `plot` for each line of a figure in turn, without end."""
    for colour, dash, marker in cycle(zip(COLOURS, DASHES, MARKERS, strict=True)):
        yield {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4, "linewidth": 1.4}


def files_of(path: Path) -> tuple[Path, Path]:
    """Return the paths of the PNG and the SVG of the figure `path`. A suffix .png or .svg of `path` is replaced; any other is part of
    the name."""
    name = path.stem if path.suffix in (".png", ".svg") else path.name
    return path.with_name(name + ".png"), path.with_name(name + ".svg")


def plain_log(axes: Any, *names: str) -> None:
    """Make the axes in `names` ("x", "y") logarithmic, with plain numbers at 1, 2 and 5, or only at 1 for a wide range."""
    for name in names:
        axis = getattr(axes, f"{name}axis")
        getattr(axes, f"set_{name}scale")("log")
        low, high = sorted(getattr(axes, f"get_{name}lim")())
        wide = high > 500.0 * low > 0.0
        axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


@contextmanager
def figure(path: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float] | None = None) -> Iterator[Any]:
    """Yield a matplotlib figure and its grid of axes, as (figure, axes[row, column]); after the block, write `path` as .png and .svg.

    `size` is the width and height in inches. Nothing is written if the block raises.
    """
    style: Any = {
        "font.size": 9, "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.grid": True, "grid.color": GREY,
        "grid.linewidth": 0.5, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "svg.hashsalt": "weir", "svg.fonttype": "none",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=size or (4.2 * columns, 3.0 * rows), layout="constrained")
        FigureCanvasAgg(drawing)
        yield drawing, drawing.subplots(rows, columns, squeeze=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        png, svg = files_of(path)
        _save_png(drawing, png)
        drawing.savefig(svg, metadata={"Date": None})


def _save_png(drawing: Any, path: Path) -> None:
    """Write the drawing with a palette: it has few colours, and then takes a third of the space."""
    canvas = BytesIO()
    drawing.savefig(canvas, format="png", dpi=160, transparent=False)
    with Image.open(canvas) as image:
        image.convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE).save(path, optimize=True)
