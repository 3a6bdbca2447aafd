"""`weir embed convert`."""

from pathlib import Path

from tests.served import weir_here
from tests.text_server.bert_as_service import bundles


def test_a_checkpoint_becomes_a_directory_that_can_be_served(tmp_path: Path) -> None:
    bundles.write_original(tmp_path / "original", labels=0)
    done = weir_here(
        "embed",
        "convert",
        tmp_path / "original",
        tmp_path / "made",
        "-ckpt_name",
        "bert_model.ckpt",
        "-cased_tokenization",
    )
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path}/made: weir embed serve {tmp_path}/made\n"), (
        done.stderr
    )
    assert (tmp_path / "made" / "model.safetensors").is_file()


def test_what_cannot_be_converted_takes_one_line(tmp_path: Path) -> None:
    done = weir_here("embed", "convert", tmp_path, tmp_path / "made")
    assert done.returncode == 2 and done.stderr.startswith(f"weir: {tmp_path}") and done.stderr.count("\n") == 1
