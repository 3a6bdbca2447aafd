"""Each figure is written as PNG and SVG, small, with what it shows named in the SVG's texts."""

import re
from pathlib import Path

import numpy as np
import pytest
from reproduction.drawing import figure, files_of
from reproduction.plots import Curve, Panel, Point, PolicyMap, Timeline

from reproduction import plots
from weir.policy.solve.tables import limit_table, static_table

_LARGEST_BYTES = 150_000


def texts(path: Path) -> list[str]:
    """Return the texts of the SVG, having looked at the PNG's size."""
    assert 1_000 < path.with_suffix(".png").stat().st_size < _LARGEST_BYTES
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.with_suffix(".svg").read_text())


def test_a_map_says_the_batch_of_each_state_that_serves(tmp_path: Path) -> None:
    maps = [PolicyMap("patient", [0.5], [limit_table(3, 4)]), PolicyMap("static", [0.1, 0.9], [static_table(2)] * 2)]
    plots.draw_policy_maps(tmp_path / "map", maps, states=6)
    shown = texts(tmp_path / "map")
    assert {"patient", "static", "0.5", "0.9", "load ρ", "requests waiting (state)"} <= set(shown)
    # States 3 to 6 of the first map serve 3, 4, 4, 4; states 2 to 6 of both rows of the second serve 2.
    assert shown.count("3") >= 1
    assert shown.count("2") >= 10


def test_panels_leave_out_what_is_not_finite(tmp_path: Path) -> None:
    panels = [
        Panel("first", [Curve("solved", [1, 10, 100], [1, 2, np.inf])], {"greedy": (5, 3), "unstable": (np.inf, 1)}),
        Panel("second", [Curve("solved", [1, 10], [1, 2]), Curve("other", [1, 10], [2, 3])]),
        Panel("third", []),
    ]
    y = ["power (W)", "b", "c"]
    plots.draw_panels(tmp_path / "p", panels, x="time (ms)", y=y, log_x=True, log_y=[True, False, False])
    shown = texts(tmp_path / "p")
    assert {"first", "second", "third", "solved", "other", "greedy", "time (ms)", "power (W)", "b", "c"} <= set(shown)
    assert "unstable" not in shown
    assert {"1", "10", "100"} & set(shown)


def test_a_timeline_shows_the_line_and_the_batches_of_the_window(tmp_path: Path) -> None:
    one = Timeline([0.0, 0.001, 0.002, 0.02], [0.002, 0.02], [0.012, 0.03], [3, 1], [0, 0])
    two = Timeline([0.0, 0.004], [0.0, 0.004], [0.02, 0.02], [5, 7], [0, 1], rows=[5, 7])
    plots.draw_timelines(tmp_path / "t", {"patient": one, "two workers": two}, begin=0.0, end=0.015)
    shown = texts(tmp_path / "t")
    assert {"patient", "two workers", "worker 0", "worker 1", "time (ms)", "rows waiting", "3", "5", "7"} <= set(shown)


def test_predictions_stand_beside_the_diagonal(tmp_path: Path) -> None:
    points = {
        "smdp": [Point(1.0, 1.02, 0.99, 1.05, "0.3"), Point(200.0, 200.0, 190.0, 210.0)],
        "full:8": [Point(np.inf, np.inf, np.inf, np.inf, "unstable")],
    }
    plots.draw_predictions(tmp_path / "p", points, what="power", unit="W")
    shown = texts(tmp_path / "p")
    assert {"smdp", "full:8", "predicted power (W)", "measured power (W)", "0.3"} <= set(shown)
    assert "unstable" not in shown


@pytest.mark.parametrize(
    ("path", "name"),
    [("it", "it"), ("it.png", "it"), ("a b/it.svg", "a b/it"), ("square.profile", "square.profile"), ("v1.2", "v1.2")],
)
def test_a_figure_is_two_files_whose_endings_are_no_part_of_its_name(path: str, name: str) -> None:
    assert files_of(Path(path)) == (Path(f"{name}.png"), Path(f"{name}.svg"))


def test_a_figure_is_written_as_both(tmp_path: Path) -> None:
    with figure(tmp_path / "v1.2") as (_, axes):
        axes[0, 0].plot([0.0, 1.0], [1.0, 2.0])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["v1.2.png", "v1.2.svg"]
