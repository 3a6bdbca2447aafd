"""The table of bert-as-service: it has all of it, and every row a test that there is, or a reason, in a comment."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.documentation.pages import ROOT, read_blocks, run_python
from tests.rings import subcases
from tests.text_models import tiny

from weir.embedding import serve
from weir.text_server.server_settings import BERT_FLAGS, ONE_DASH

PAGE = ROOT / "docs" / "reference" / "bert-as-service.md"
SHOWN = re.compile(r"<!-- (.+?) -->")
TEST = re.compile(r"(test_\w+\.py)::(test_\w+)")

FLAGS = """
model_dir tuned_model_dir ckpt_name config_name graph_tmp_dir max_seq_len pooling_layer pooling_strategy mask_cls_sep no_special_token
show_tokens_to_client no_position_embeddings num_labels port port_in port_data port_out port_result http_port http_max_connect cors num_worker
max_batch_size priority_batch_size cpu xla fp16 gpu_memory_fraction device_map prefetch_size fixed_embed_length verbose version cased_tokenization
ip timeout test_client_batch_size test_max_batch_size test_max_seq_len test_num_client test_pooling_layer wait_till_ready client_vocab_file
num_repeat
"""
STRATEGIES = """
NONE REDUCE_MAX REDUCE_MEAN REDUCE_MEAN_MAX FIRST_TOKEN CLS_TOKEN LAST_TOKEN SEP_TOKEN CLS_POOLED CLASSIFICATION REGRESSION
"""
CLIENT = """
ip port port_out output_fmt show_server_config identity check_version check_length check_token_info ignore_all_checks timeout encode fetch
fetch_all encode_async status server_config server_status close ConcurrentBertClient is_tokenized show_tokens blocking
"""


def rows() -> Iterator[list[str]]:
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and (shown := SHOWN.search(line)) is not None:
            yield [*(cell.strip() for cell in re.split(r"(?<!\\)\|", SHOWN.sub("", line))[1:-1]), shown[1]]


ROWS = list(rows())


@cache
def named_in(name: str) -> set[str]:
    files = (ROOT / "tests").rglob(name)
    return {found for file in files for found in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.M)}


def test_every_row_of_every_table_has_such_a_comment() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [line for line in lines if "<!--" not in line and "---" not in line] == [
        lines[place - 1] for place, line in enumerate(lines) if line.startswith("| ---")
    ]


@subcases("row", ROWS)
def test_every_row_has_a_test_that_there_is_or_a_reason(row: list[str]) -> None:
    found = TEST.fullmatch(row[-1])
    if found is None:
        assert row[-1].startswith("not tested: ")
    else:
        assert found[2] in named_in(found[1]), f"{found[1]} has no {found[2]}"


@pytest.mark.parametrize(("names", "form"), [(FLAGS, r"`-{}`"), (STRATEGIES, r"`{}`"), (CLIENT, r"`[^`]*\b{}\b[^`]*`")])
def test_nothing_is_left_out(names: str, form: str) -> None:
    firsts = "\n".join(row[0] for row in ROWS)
    assert not [name for name in names.split() if not re.search(form.format(name), firsts)]


def test_the_old_names_that_are_known_are_those_in_it() -> None:
    short = {"device", "prefetch"}  # for others
    known = {name.removeprefix(ONE_DASH) for name in BERT_FLAGS} - short
    starting = (row for row in ROWS if len(row) == 4)
    assert known == {name for row in starting for name in re.findall(r"`-(\w+)`", row[0])}


# The page about bert-as-service's client does what it shows, against a real server of a tiny model.


CLIENT_PAGE = ROOT / "docs" / "how-to" / "use-bert-serving-client.md"


def test_the_page_does_what_it_shows(tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "tiny")
    with serve(directory, port=0, zmq_port=0, cache=str(tmp_path / "cache")) as server:
        assert server.zmq_ports is not None
        blocks = [block for block in read_blocks(CLIENT_PAGE) if block.language == "python"]
        assert len(blocks) == 2
        for block in blocks:
            text = block.text.replace("5555", str(server.zmq_ports[0])).replace("5556", str(server.zmq_ports[1]))
            text = text.replace("http://localhost:8000", server.url)
            run_python(block._replace(text=text), CLIENT_PAGE, {})
