"""The server in the program itself, as threads and forked processes meet it. What its clients ask: tests/client."""

from typing import Any

import pytest
from tests.serving.kit import Square
from tests.serving.test_blocking import run_script, together

from weir import Model, ModelError
from weir.errors import Conflict
from weir.inprocess import InProcess

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_threads_that_race_to_start_it_all_get_a_server_that_runs() -> None:
    client = InProcess(Square, executor="inline")

    def use() -> bool:
        return client.start().server_ready()

    assert together(16, use) == [True] * 16
    with pytest.raises(Conflict, match="already running"), client:
        pass
    client.close()


def test_after_a_fork_it_is_refused() -> None:
    ended = run_script(
        """
        import os, sys, weir
        from weir.inprocess import InProcess
        class Square(weir.Model):
            def predict(self, batch):
                return [x * x for x in batch]
        client = InProcess(Square, executor="inline").start()
        if os.fork() == 0:
            for call in (client.server_ready, client.start):
                try:
                    call()
                except weir.errors.Conflict as error:
                    print(error, flush=True)
            client.close()
            sys.exit()
        assert os.wait()[1] == 0
        print(client.server_ready())
        client.close()
        """
    )
    *refusals, ready = ended.stdout.splitlines()
    assert (ready, ended.stderr, ended.returncode) == ("True", "", 0)
    assert len(refusals) == 2
    assert all("forked" in refusal for refusal in refusals)


class Picky(Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        raise TimeoutError("the disk is slow")


def test_what_the_model_raised_can_be_caught() -> None:
    with InProcess(Picky, executor="inline") as client:
        for call in (
            lambda: client.infer("picky", {"input": ["a"]}),
            lambda: list(client.stream("picky", {"input": ["a"]})),
        ):
            with pytest.raises(ModelError, match="the disk is slow") as caught:
                call()
            assert isinstance(caught.value, TimeoutError)
