"""The page about bert-as-service's client does what it shows, against a real server of a tiny model."""

from pathlib import Path

from tests.documentation.pages import ROOT, read_blocks, run_python
from tests.text_models import tiny

from weir.embedding import serve

PAGE = ROOT / "docs" / "how-to" / "use-bert-serving-client.md"


def test_the_page_does_what_it_shows(tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "tiny")
    with serve(directory, port=0, zmq_port=0, cache=str(tmp_path / "cache")) as server:
        assert server.zmq_ports is not None
        blocks = [block for block in read_blocks(PAGE) if block.language == "python"]
        assert len(blocks) == 2
        for block in blocks:
            text = block.text.replace("5555", str(server.zmq_ports[0])).replace("5556", str(server.zmq_ports[1]))
            text = text.replace("http://localhost:8000", server.url)
            run_python(block._replace(text=text), PAGE, {})
