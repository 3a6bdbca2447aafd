from pathlib import Path

import pytest
from reproduction.drawing import figure, files_of


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
