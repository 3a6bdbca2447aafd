"""From arrays to tensors."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import numpy as np
import pytest
from tests.rings import subcases

from weir import client as clients
from weir import errors
from weir.client import NEVER, ConnectionLost, Result, Retry, TensorValue, Unreachable, calls
from weir.client.http import HttpCalls
from weir.client.http_connection import HttpReply, error_of
from weir.errors import InvalidRequest, SettingsError, WeirError
from weir.wire.inference import InferenceResponse
from weir.wire.sse import MAX_EVENT_BYTES


def test_the_datatype_is_that_of_the_array() -> None:
    kinds: dict[str, Any] = {"BOOL": bool, "INT8": np.int8, "UINT64": np.uint64, "FP16": np.float16, "FP64": float}
    for datatype, dtype in kinds.items():
        assert calls.tensor_of("x", np.zeros(2, dtype)).datatype == datatype
    swapped = calls.tensor_of("x", np.array([1, 2], ">i4"))
    assert (swapped.datatype, swapped.array.tolist(), swapped.array.dtype) == ("INT32", [1, 2], np.dtype("int32"))


def test_texts_and_bytes_are_bytes() -> None:
    for array in (np.array(["é"]), np.array(["é".encode()]), np.array(["é"], object)):
        assert calls.tensor_of("x", array).array.tolist() == ["é".encode()]
    with pytest.raises(errors.InvalidRequest, match="neither bytes nor a text"):
        calls.tensor_of("x", np.array([3], object))


def test_other_arrays_are_refused_and_tensors_are_taken_as_they_are() -> None:
    with pytest.raises(errors.InvalidRequest, match="complex128"):
        calls.tensor_of("x", np.array([1j]))
    given = TensorValue("x", "BF16", np.zeros(2, np.uint16))
    assert calls.tensor_of("x", given) is given


def test_what_is_given_beside_the_inputs() -> None:
    said = calls.request_of(
        "m", {}, {"version": "2", "id": "7", "outputs": ["y"], "priority": 1, "timeout": 0.5, "parameters": {"a": 1}}
    )
    assert (said.version, said.id, [each.name for each in said.outputs or ()]) == ("2", "7", ["y"])
    assert said.parameters == {"a": 1, "priority": 1, "timeout": 500_000}
    assert calls.request_of("m", {}, {}).outputs is None


def test_a_result_is_a_mapping_of_arrays() -> None:
    array = np.array([1, 2], np.int32)
    response = InferenceResponse("m", [TensorValue("y", "INT32", array)], parameters={"triton_final_response": True})
    result = Result(response)
    assert (len(result), list(result), result["y"] is array, result.parameters) == (1, ["y"], True, {})
    assert repr(result) == "Result('m', [TensorValue('y', INT32, shape [2])])"


LIVE = HttpReply(200, {}, b'{"models": ["a"]}')


def waits(retry: Retry, replies: list[Any]) -> tuple[Any, list[float]]:
    """Return what comes of asking for the models while the server gives `replies`, and the waits in between."""
    program: calls.Program[Any] = calls.retried(retry, HttpCalls().models)
    waited: list[float] = []
    given: Any = None
    while True:
        try:
            step = program.throw(given) if isinstance(given, Exception) else program.send(given)
        except StopIteration as end:
            return end.value, waited
        except errors.WeirError as error:
            return error, waited
        if isinstance(step, calls.Sleep):
            waited.append(step.seconds)
            given = None
        else:
            given = replies.pop(0)


def refusal(status: int, name: str = "", **headers: str) -> HttpReply:
    return HttpReply(status, {**({"weir-error": name} if name else {}), **headers}, b'{"error": "no"}')


def test_a_full_line_is_tried_again_after_the_servers_wait() -> None:
    assert waits(Retry(), [refusal(429, **{"retry-after": "3"}), LIVE]) == (["a"], [3.0])


def test_without_one_waits_double() -> None:
    retry = Retry(times=4, first_wait=0.5, longest_wait=1.5)
    refused = [refusal(503), Unreachable("nobody"), refusal(503), refusal(503)]
    assert waits(retry, [*refused, LIVE]) == (["a"], [0.5, 1.0, 1.5, 1.5])


def test_it_is_not_tried_for_ever() -> None:
    end, waited = waits(Retry(times=1), [refusal(503, "Draining"), refusal(429)])
    assert (type(end), len(waited)) == (errors.Overloaded, 1)
    end, waited = waits(NEVER, [refusal(503, "Draining")])
    assert (type(end), waited) == (errors.Draining, [])


@subcases(("reply", "kind"), [
    (refusal(500, "ModelCrashed"), errors.ModelCrashed), (refusal(503, "WorkerLost"), errors.WorkerLost),
    (refusal(500), errors.ModelError), (refusal(400), errors.InvalidRequest), (refusal(408), errors.RequestTimeout),
    (ConnectionLost("gone"), ConnectionLost),
])  # fmt: skip
def test_what_a_model_may_have_been_given_is_never_sent_again(reply: Any, kind: type[Exception]) -> None:
    end, waited = waits(Retry(), [reply, LIVE])
    assert (type(end), waited) == (kind, [])


def test_an_event_that_is_too_long_or_no_response_is_an_error_of_ours() -> None:
    for data in (b"data: %b" % bytes(MAX_EVENT_BYTES + 1), b"data: null\n\n", b"data: {" + b'"a":[' * 10_000 + b"\n\n"):
        request = calls.request_of("a", {"x": numpy.ones(1)}, {})
        with pytest.raises(WeirError, match=r"^stream: the response has another form|must be an inference response"):
            list(HttpCalls().stream(request).decoder()(data))


def test_where_there_is_no_time_for_the_wait_the_refusal_is_the_end() -> None:
    program = calls.retried(Retry(), HttpCalls().models)
    next(program)
    assert program.send(refusal(429, **{"retry-after": "60"})) == calls.Sleep(60.0)
    with pytest.raises(errors.Overloaded, match="no"):
        program.throw(errors.DeadlineExceeded("no time"))
    refused = errors.Overloaded("no", retry_after=60.0)
    assert (Retry().wait(refused, 0, 60.0), Retry().wait(refused, 0, 60.1)) == (None, 60.0)


async def test_an_error_is_freed_with_the_last_who_has_it() -> None:
    """It keeps no body of a call until garbage is collected."""

    def send(step: Any, seconds: float) -> Any:
        raise WeirError("no")

    async def send_async(step: Any, seconds: float) -> Any:
        send(step, seconds)

    def program() -> calls.Program[None]:
        yield "step"

    found = []
    gc.disable()
    try:
        try:
            calls.run(program(), send, 1.0)
        except WeirError as error:
            found.append(weakref.ref(error))
        try:
            await calls.run_async(program(), send_async, 1.0)
        except WeirError as error:
            found.append(weakref.ref(error))
        assert [each() for each in found] == [None, None]
    finally:
        gc.enable()


@subcases(
    ("status", "kind"),
    [(400, errors.InvalidRequest), (404, errors.ModelNotFound), (413, errors.TooLarge), (429, errors.Overloaded),
     (501, errors.Unsupported), (503, errors.CapacityError), (418, errors.WeirError), (401, errors.Unauthorized), (403, errors.Forbidden), (405, errors.MethodNotAllowed), (408, errors.RequestTimeout),
     (504, errors.DeadlineExceeded), (409, errors.Conflict), (415, errors.UnsupportedMediaType), (422, errors.ValidationFailed),
     (499, errors.Cancelled), (500, errors.ModelError)],
)  # fmt: skip
def test_an_error_without_a_name_is_what_its_status_stands_for(status: int, kind: type[errors.WeirError]) -> None:
    assert type(calls.error_of_status(status, "because", name="NoSuchError")) is kind


def test_grpc_tells_a_refusal_from_a_broken_connection() -> None:
    assert type(calls.error_of_code("UNAVAILABLE", "loading", retry_after=1.0)) is errors.CapacityError
    assert type(calls.error_of_code("UNAVAILABLE", "failed to connect to all addresses")) is Unreachable
    assert type(calls.error_of_code("UNAVAILABLE", "Socket closed")) is ConnectionLost
    assert type(calls.error_of_code("RESOURCE_EXHAUSTED", "message larger than max")) is errors.TooLarge
    assert type(calls.error_of_code("RESOURCE_EXHAUSTED", "the queue is full", retry_after=1.0)) is errors.Overloaded
    assert type(calls.error_of_code("DATA_LOSS", "")) is errors.WeirError


def test_the_text_and_the_wait_are_kept() -> None:
    error = error_of(HttpReply(429, {"retry-after": "3"}, b'{"error": "the line is full"}'))
    assert isinstance(error, errors.Overloaded)
    assert (error.message, error.retry_after) == ("the line is full", 3.0)
    assert error_of(HttpReply(502, {}, b"<html>bad gateway")).message == "<html>bad gateway"
    assert error_of(HttpReply(500, {}, b'{"error": {"type": "x", "message": "inside"}}')).message == "inside"
    assert error_of(HttpReply(500, {}, b"")).message == "HTTP status 500"


NONE = [0, -1, 0.0, float("nan"), float("inf"), "5", 10**400]
ONE = {"x": numpy.ones(1)}
NOBODY = "http://127.0.0.1:9"


@subcases("timeout", NONE)
def test_what_is_no_time_is_refused(timeout: Any) -> None:
    with pytest.raises(SettingsError, match=r"timeout=.*greater than 0"):
        calls.of_client(timeout)
    with pytest.raises(InvalidRequest, match=r"timeout=.*greater than 0"):
        calls.of_call(timeout, 60.0)
    assert (calls.of_client(3), calls.of_call(None, 3.0), calls.of_call(0.5, 3.0)) == (3.0, 3.0, 0.5)


@subcases(
    ("client", "scheme"), [(clients.HttpClient, "http"), (clients.GrpcClient, "grpc"), (clients.WebSocketClient, "ws")]
)
def test_no_client_is_made_with_none(client: Callable[..., Any], scheme: str) -> None:
    with pytest.raises(SettingsError, match="timeout=0:"):
        client(NOBODY.replace("http", scheme), timeout=0)


def test_an_address_of_grpc_may_have_its_scheme() -> None:
    for scheme in ("grpc", "grpcs"):
        with clients.GrpcClient(f"{scheme}://127.0.0.1:9", timeout=5) as client, pytest.raises(clients.Unreachable):
            client.server_metadata()
    with pytest.raises(
        SettingsError, match=r"address='http://127.0.0.1:9': must be HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT"
    ):
        clients.GrpcClient("http://127.0.0.1:9")


async def test_no_call_begins_with_none() -> None:
    with clients.HttpClient(NOBODY) as client:
        for ask in (
            lambda: client.infer("doubles", ONE, timeout=0),
            lambda: list(client.stream("doubles", ONE, timeout=0)),
            lambda: client.wait_until_server_ready(0),
        ):
            with pytest.raises(InvalidRequest, match="timeout=0:"):
                ask()
        with pytest.raises(
            TypeError, match=r"timout: unknown option of a request; the options are version, .*, timeout, bulk"
        ):
            client.infer("doubles", ONE, timout=5)  # type: ignore[call-overload]  # as people mistype it
    async with clients.AsyncHttpClient(NOBODY) as awaited:
        with pytest.raises(InvalidRequest, match="timeout=-1:"):
            await awaited.infer("doubles", ONE, timeout=-1)
        with pytest.raises(InvalidRequest, match="timeout=-1:"):
            [one async for one in awaited.stream("doubles", ONE, timeout=-1)]
