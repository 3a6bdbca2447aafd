"""`weir check` and `weir profile` of streaming models and chains."""

from pathlib import Path

from tests.served import weir

COUNT = f"{Path(__file__).parent / 'streaming_models.py'}:Count"


def test_check_shows_all_answers() -> None:
    done = weir("check", COUNT)
    assert done.returncode == 0, done.stderr
    assert "[1, 2]" in done.stdout
    assert "--fronts would not help: it streams, so the server process reads its requests" in done.stdout


def test_profile_measures_whole_streams(tmp_path: Path) -> None:
    path = tmp_path / "count.toml"
    done = weir("profile", COUNT, "--sizes", "1,8", "--seconds", "0.2", "--output", path)
    assert done.returncode == 0, done.stderr
    assert path.exists()


def test_check_starts_the_steps_of_a_chain(tmp_path: Path) -> None:
    file = tmp_path / "chained.py"
    file.write_text(CHAINED)
    done = weir("check", f"{file}:Half", f"{file}:Quarter")
    assert done.returncode == 0, done.stderr
    assert "2.5" in done.stdout and "--fronts" not in done.stdout
    alone = weir("check", f"{file}:Quarter")
    assert "step 'half': unknown model 'half'" in alone.stderr


def test_one_worker_is_tried_and_measured_of_a_model_with_two_kinds(tmp_path: Path) -> None:
    config = tmp_path / "weir.toml"
    config.write_text('[models.count]\nworkers = 2\nworker_kinds = ["large", "small"]\n')
    done = weir("check", COUNT, "--config", config)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "count.toml"
    done = weir("profile", COUNT, "--config", config, "--sizes", "1", "--seconds", "0.1", "--output", path)
    assert done.returncode == 0, done.stderr
    config.write_text('[models.count]\nworkers = 1\nworker_kinds = ["large", "small"]\n')
    refused = weir("check", COUNT, "--config", config)  # as it would be served
    assert "workers=1: no worker is of the kind 'small'; have more workers" in " ".join(refused.stderr.split())
    refused = weir("profile", COUNT, "--worker-kinds", "large")
    assert "No such option: --worker-kinds" in refused.stderr


def test_check_says_how_to_write_predict_for_a_list(tmp_path: Path) -> None:
    file = tmp_path / "single.py"
    file.write_text(SINGLE)
    done = weir("check", f"{file}:Square")
    assert done.returncode != 0
    assert "so you may have written it for one: return [f(item) for item in batch]" in " ".join(
        (done.stdout + done.stderr).split()
    )


SINGLE = """
import weir

class Square(weir.Model):
    examples = [3]

    def predict(self, x):
        return x ** 2
"""

CHAINED = """
import weir

class Half(weir.Model):
    def predict(self, batch):
        return [x / 2 for x in batch]

class Quarter(weir.Chain):
    steps = ["half", "half"]
    examples = [10]
"""
