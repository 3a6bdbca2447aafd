"""Reads HTTP answers from bytes."""

from typing import Any, NamedTuple

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser


class HttpAnswer(NamedTuple):
    """One answer. `keeps`: the connection may be used again."""

    status: int
    body: bytes
    keeps: bool


class Garbage(Exception):
    """What came is no answer of HTTP/1.1."""


class AnswerReader:
    """Takes the bytes of one connection. Bodies are kept if `bodies`, or if the answer is an error."""

    def __init__(self, bodies: bool = False) -> None:
        self._bodies = bodies
        self._parser = HttpResponseParser(self)
        self._body = b""
        self._answers: list[HttpAnswer] = []
        self.begun = False  # within an answer

    def feed(self, data: bytes) -> list[HttpAnswer]:
        """Return the answers that `data` completes. Raises Garbage."""
        answers: list[HttpAnswer] = []
        self._answers = answers
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise Garbage(f"{type(error).__name__}: {error}") from error
        return answers

    # What httptools calls.

    def on_message_begin(self) -> None:
        """An answer begins."""
        self.begun = True
        self._body = b""

    def on_body(self, body: bytes) -> None:
        """Some of its body."""
        if self._bodies or self._parser.get_status_code() >= 300:
            self._body += body

    def on_message_complete(self) -> None:
        """It is whole. 1xx is none: the answer comes after it."""
        self.begun = False
        status = self._parser.get_status_code()
        if status >= 200:
            self._answers.append(HttpAnswer(status, self._body, self._parser.should_keep_alive()))


def outcome_of(answer: HttpAnswer) -> str:
    """Return "ok" for 2xx, else the code, and the type of the error where the body says it: "429 Overloaded"."""
    if 200 <= answer.status < 300:
        return "ok"
    kind = error_of(answer).get("type")
    return f"{answer.status} {kind}" if isinstance(kind, str) else str(answer.status)


def error_of(answer: HttpAnswer) -> dict[str, Any]:
    """Return the error document in the answer, or {}."""
    try:
        error = msgspec.json.decode(answer.body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError, IndexError):
        return {}
    return error if isinstance(error, dict) else {}
