"""The door over its life: taken ports, counts, restarts under living clients, ends."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.embedding.zeromq.hashing import DIMENSIONS, vector_of
from tests.embedding.zeromq.opened import Connect, Opened

from weir.client import EmbeddingClient
from weir.errors import Draining, InvalidRequest, ModelNotFound, SettingsError, Unauthorized
from weir.protocols.control import ControlSettings
from weir.protocols.settings import HttpSettings

TEXTS = ["First do it", "then do it right", "then do it better"]


def expected(texts: list[Any]) -> Any:
    return numpy.stack([vector_of(text) for text in texts])


def test_a_port_that_is_taken_is_named(opened: Opened) -> None:
    taken = ((Opened(port=opened.port), "zmq_port="), (Opened(port_out=opened.port_out), "zmq_port_out="))
    for other, text in taken:
        with pytest.raises(SettingsError, match=f"host='127.0.0.1', {text}[0-9]+: cannot listen there"):
            asyncio.run(other._start())
        asyncio.run(other.door.stop())
    with pytest.raises(SettingsError, match="host='no host at all'"):
        asyncio.run(Opened(http=HttpSettings(host="no host at all"))._start())


def test_calls_are_counted() -> None:
    with Opened() as opened, EmbeddingClient(opened.url, port_out=opened.port_out, timeout=20.0) as client:
        client.encode(["a", "b"])
        with pytest.raises(InvalidRequest):
            client.encode(["!fail"])
        with pytest.raises(ModelNotFound):
            client.encode(TEXTS, model="absent")
        opened.call(lambda: opened.door.drops("message", "a test"))
        counted = {
            (sample.name, *sample.labels.values()): sample.value
            for family in opened.counts.collect()
            for sample in family.samples
        }
    assert counted["weir_text_calls_total", "hashing", "zeromq", "200"] == 1
    assert counted["weir_text_calls_total", "hashing", "zeromq", "400"] == 1
    assert counted["weir_text_calls_total", "", "zeromq", "404"] == 1
    assert counted["weir_texts_total", "hashing", "zeromq"] == 2
    assert counted["weir_zeromq_dropped_total", "message"] == 1


# Restarts.


def test_a_restart_is_waited_for(connect: Connect) -> None:
    with Opened() as first:
        client = connect(first)
        client.encode(["!wait"], blocking=False)
        first.until(lambda: bool(first.encoder.asked))
    with Opened(port=first.port, port_out=first.port_out) as second:
        second.until(lambda: bool(second.encoder.asked))  # the client has found out, and sent it once more
        second.call(second.encoder.released.set)
        assert client.fetch_all()[0].shape == (1, DIMENSIONS)
        assert (client.encode(TEXTS) == expected(TEXTS)).all()


def test_what_is_lost_with_a_connection_is_sent_again(connect: Connect) -> None:
    with Opened() as opened:
        client = connect(opened)

        def end_all() -> None:
            for peer in [*opened.door._in.peers, *opened.door._out.peers]:
                peer.transport.abort()

        opened.call(end_all)
        assert (client.encode(TEXTS) == expected(TEXTS)).all()


def test_a_lost_answer_is_made_again(connect: Connect, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect()
    lost = threading.Event()
    publisher = opened.door._publisher
    publish = publisher.publish

    def lose(frames: Any) -> None:
        monkeypatch.undo()
        lost.set()

    monkeypatch.setattr(publisher, "publish", lose)
    assert (client.encode(TEXTS) == expected(TEXTS)).all()
    assert lost.is_set()
    assert publisher.publish == publish


# The end.


def test_the_server_ends_when_it_is_asked_to() -> None:
    with Opened() as opened, EmbeddingClient(opened.url, port_out=opened.port_out, timeout=20.0) as client:
        client.terminate()
        assert opened.ended.wait(20)
        opened.call(opened.door.refuse)
        with pytest.raises(Draining):
            client.encode(TEXTS, timeout=0.3)


def test_with_a_token_only_who_has_it_may_end_the_server(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    control = ControlSettings(control_token_file=str(tmp_path / "token"))
    with Opened(control=control) as opened:
        said: dict[str, Any] = {"port_out": opened.port_out, "timeout": 20.0}
        for token in (None, "other"):
            with EmbeddingClient(opened.url, token=token, **said) as client, pytest.raises(Unauthorized):
                client.terminate()
        assert not opened.ended.is_set()
        with EmbeddingClient(opened.url, token="secret", **said) as client:
            client.terminate()
        assert opened.ended.wait(20)


def test_a_drain_waits_for_the_answers(connect: Connect) -> None:
    with Opened() as opened:
        client = connect(opened)
        client.encode(["!wait"], blocking=False)
        opened.until(lambda: bool(opened.encoder.asked))
        assert not opened.run(opened.door.drain(0.05))
        opened.call(opened.encoder.released.set)
        assert opened.run(opened.door.drain(20.0))
        assert client.fetch_all()[0].shape == (1, DIMENSIONS)
