"""The map of the house names what there is."""

import re
from xml.etree import ElementTree

from docs.architecture import HELPERS, PAGE, PICTURE, STATIONS, file_of, layers
from tests.documentation.pages import ROOT
from tests.rings import subcases

SOURCE = ROOT / "src" / "weir"
NAMES = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", (ROOT / PAGE).read_text())))


@subcases("name", NAMES)
def test_what_the_page_names_exists(name: str) -> None:
    place = (ROOT if name.startswith("benchmarks") else SOURCE) / name
    assert place.is_dir() if name.endswith("/") else place.is_file()


def test_the_page_names_every_part() -> None:
    missing = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert missing - {name.rstrip("/") for name in NAMES} == set()


def test_the_contract_orders_every_module_at_the_top() -> None:
    ordered = {name for layer in layers() for name in layer}
    found = {
        "weir." + path.stem
        for path in SOURCE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and not path.stem.startswith("_")
    }
    assert found == ordered
    assert all(file_of(name).is_file() for name in ordered)


def test_the_picture_is_of_parts_that_exist() -> None:
    drawn = [room for _, room, *_ in (*STATIONS, *HELPERS) if room]
    assert len(drawn) == len(set(drawn)) == 9
    assert all((SOURCE / room / "__init__.py").exists() for room in drawn)
    root = ElementTree.fromstring((ROOT / PICTURE).read_text())
    shown = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {f"weir.{room}" for room in drawn} <= set(shown)
