"""Models of mosec and LitServe as they are: what a subclass of `mosec.Worker` or `litserve.LitAPI` needs to be a model.

Nothing of the other servers is imported here. A model gets single items where `max_batch_size` is 1, the default there and here, else lists.
"""

import inspect
import queue
import threading
from collections.abc import Callable, Generator, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from weir.errors import InvalidRequest, SettingsError, ValidationFailed
from weir.model import Adapter, class_names

MOSEC, MOSEC_SSE, LITSERVE = "mosec.worker.Worker", "mosec.worker.SSEWorker", "litserve.api.LitAPI"
_JSON = "application/json"


def _foreign(found: type, base: str) -> type:
    return found.__mro__[class_names(found).index(base)]


class AdaptedClass:
    """The base class of both adapters. `foreign` is the class that is adapted."""

    foreign: ClassVar[Any] = None
    max_batch_size: ClassVar[int | None] = None
    worker_index: int
    torch_device: Callable[..., str]

    def __init__(self, *arguments: Any, **params: Any) -> None:
        self._arguments, self._params = arguments, params

    def _run(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Return what `call` returns. Raises its errors as a caller of Weir gets them."""
        try:
            return call(*arguments, **more)
        except Exception as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        return error


# mosec.

_REFUSALS = ("mosec.errors.ClientError", "mosec.errors.DecodingError")


def adapt_mosec(found: type) -> Adapter:
    """Return the adapter of a class of mosec. Raises SettingsError for what it cannot adapt."""
    if inspect.isabstract(found):
        raise SettingsError(f"{found.__name__}: must implement forward(data)")
    worker, own = _foreign(found, MOSEC), vars(found)
    types = list(dict.fromkeys([getattr(found, "req_mime_type"), getattr(found, "resp_mime_type")]))  # noqa: B009 - `type` has no such attributes
    reads = any(getattr(found, name) is not getattr(worker, name) for name in ("deserialize", "serialize"))
    examples = [item for batch in getattr(found, "multi_examples", ()) for item in batch]
    example = getattr(found, "example", None)
    attributes: dict[str, Any] = {
        "max_batch_size": 1,
        "examples": tuple(examples or ([] if example is None else [example])),
        "__doc__": own.get("__doc__"),
    }
    if MOSEC_SSE in class_names(found):
        return Adapter(MosecStream, {**attributes, "streaming": True})
    if reads:
        return Adapter(MosecBytes, {**attributes, "content_types": (*types, *([_JSON] if _JSON not in types else []))})
    return Adapter(MosecWorker, attributes)


class MosecWorker(AdaptedClass):
    """Runs the `forward` of a mosec.Worker. Its items and responses are JSON."""

    def load(self) -> None:
        """Make the worker, whose constructor loads the model."""
        self._worker = self.foreign(*self._arguments, **self._params)
        self._worker.worker_id = self.worker_index + 1
        self._worker.max_batch_size = self.max_batch_size
        self._worker.stage = "x"  # ingress and egress

    def predict(self, batch: list[Any]) -> Any:
        """Return the responses of `forward`."""
        if self.max_batch_size == 1:
            return [self._run(self._worker.forward, item) for item in batch]
        return self._run(self._worker.forward, batch)

    def _translated(self, error: Exception) -> Exception:
        names = class_names(type(error))
        if "mosec.errors.ValidationError" in names:
            return ValidationFailed(str(error))
        return InvalidRequest(str(error) or type(error).__name__) if any(name in names for name in _REFUSALS) else error


class MosecBytes(MosecWorker):
    """Runs a mosec.Worker that reads and writes bodies itself (`deserialize`, `serialize`)."""

    def decode(self, body: bytes, content_type: str) -> Any:
        """Return what `deserialize` makes of a body."""
        return self._run(self._worker.deserialize, bytes(body))

    def encode(self, value: Any, content_type: str) -> bytes:
        """Return what `serialize` makes of a response."""
        return bytes(self._run(self._worker.serialize, value))


class _EventRoom:
    """Bounds how many events of a worker wait for being sent, until nobody reads them any more."""

    def __init__(self, most: int) -> None:
        self._free = threading.Semaphore(most)
        self._closed = False

    def acquire(self) -> None:
        """Wait for room for an event."""
        if not self._closed:
            self._free.acquire()

    def release(self) -> None:
        """Note that an event was sent."""
        self._free.release()

    def close(self) -> None:
        """Have room for everything from now on."""
        self._closed = True
        self._free.release()


class MosecStream(MosecWorker):
    """Runs a mosec.SSEWorker: each event that it sends is a part of the response."""

    _MOST = 1000  # events that wait for being sent

    def predict(self, batch: list[Any]) -> Generator[dict[int, Any], frozenset[int], None]:
        """Yield the events as `forward` sends them."""
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        room = _EventRoom(self._MOST)
        self._worker._stream_queue, self._worker._stream_semaphore = events, room

        def forward() -> None:
            try:
                self._run(self._worker.forward, batch[0] if self.max_batch_size == 1 else batch)
                events.put(None)
            except BaseException as error:
                events.put(error)

        thread = threading.Thread(target=forward, name="weir-forward", daemon=True)
        thread.start()
        try:
            while (given := events.get()) is not None:
                if isinstance(given, BaseException):
                    raise given
                room.release()
                text, index = given
                yield {index: text}
        finally:
            room.close()
            thread.join()  # before it gets its next batch


# LitServe.


def adapt_litserve(found: type) -> Adapter:
    """Return the adapter of a class of LitServe. Raises SettingsError for what it cannot adapt."""
    predict: Any = getattr(found, "predict")  # noqa: B009 - `type` has no such attribute
    if predict is getattr(_foreign(found, LITSERVE), "predict"):  # noqa: B009 - the same
        raise SettingsError(f"{found.__name__}: must implement predict(x)")
    if inspect.isasyncgenfunction(predict):
        raise SettingsError(f"{found.__name__}.predict: an async generator is not supported; write a generator")
    attributes: dict[str, Any] = {"max_batch_size": 1, "__doc__": vars(found).get("__doc__")}
    annotated = _annotated_request(found)
    if isinstance(annotated, type) and hasattr(annotated, "model_validate"):
        attributes["Input"] = annotated
    elif getattr(annotated, "__name__", "") == "UploadFile":
        rule = f"{found.__name__}.decode_request: uploads are not supported; write a weir.Model with decode"
        raise SettingsError(rule)
    if inspect.isgeneratorfunction(predict):
        return Adapter(LitStream, {**attributes, "streaming": True})
    return Adapter(LitModel, attributes)


def _annotated_request(found: Any) -> Any:
    try:
        parameters = list(inspect.signature(found.decode_request, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError):
        return None
    return parameters[1].annotation if len(parameters) > 1 else None


class Decoded(NamedTuple):
    """Holds what `decode_request` has made of an item, and the context that the methods of a LitAPI share for it."""

    value: Any
    context: dict[str, Any]


class LitModel(AdaptedClass):
    """Runs a LitAPI: decode_request, batch, predict, unbatch and encode_response."""

    streaming: ClassVar[bool] = False

    def load(self) -> None:
        """Make the API and call its `setup` with the device. Raises SettingsError for a `spec`."""
        self._api = api = self.foreign(*self._arguments, **self._params)
        if getattr(api, "_spec", None) is not None:
            raise SettingsError(f"{type(api).__name__}: spec={type(api._spec).__name__}: is not adapted")
        api.max_batch_size, api.stream = self.max_batch_size, self.streaming
        self._loop: Any = None
        if find_spec("torch") is None:
            api.device = "cpu"
        else:
            api.device = self.torch_device("auto")
        if hasattr(api, "set_logger_queue"):
            api.set_logger_queue(_LogQueue())
        api.pre_setup()
        api.setup(api.device)

    def preprocess(self, item: Any) -> Decoded:
        """Return what `decode_request` makes of an item."""
        context: dict[str, Any] = {}
        return Decoded(self._call(self._api.decode_request, item, context), context)

    def predict(self, batch: list[Decoded]) -> Any:
        """Return the API's responses to a batch."""
        if self.max_batch_size == 1:
            return [self._call(self._api.predict, *each) for each in batch]
        return self._call(self._api.unbatch, self._predicted(batch), _contexts(batch))

    def postprocess(self, item: Any, preprocessed: Decoded) -> Any:
        """Return what `encode_response` makes of a response."""
        return _plain(self._call(self._api.encode_response, item, preprocessed.context))

    def _predicted(self, batch: list[Decoded]) -> Any:
        contexts = _contexts(batch)
        joined = self._call(self._api.batch, [each.value for each in batch], contexts)
        return self._call(self._api.predict, joined, contexts)

    def _call(self, method: Callable[..., Any], value: Any, context: Any) -> Any:
        """Return what a method of the API returns; it gets `context` if it has a parameter of this name."""
        more = {"context": context} if "context" in inspect.signature(method).parameters else {}
        returned = self._run(method, value, **more)
        return self._run(self._awaited, returned) if inspect.isawaitable(returned) else returned

    def _awaited(self, coroutine: Any) -> Any:
        if self._loop is None:
            import asyncio  # only models that use it load it

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)

    def _translated(self, error: Exception) -> Exception:
        """Return an error of the caller for an HTTPException of 400 to 499."""
        status = getattr(error, "status_code", 0)
        if isinstance(status, int) and 400 <= status < 500:
            return InvalidRequest(str(getattr(error, "detail", error)))
        return error


class LitStream(LitModel):
    """Runs a LitAPI whose `predict` is a generator."""

    streaming: ClassVar[bool] = True

    # The responses are encoded one by one in `predict`, so there is nothing left to do.
    postprocess: Any = lambda self, item: item

    def predict(self, batch: list[Decoded]) -> Generator[dict[int, Any], frozenset[int], None]:
        """Yield what `encode_response` yields."""
        alone = self.max_batch_size == 1
        contexts: Any = batch[0].context if alone else _contexts(batch)
        if alone:
            outputs = self._call(self._api.predict, *batch[0])
        else:
            outputs = self._call(self._api.unbatch, self._predicted(batch), contexts)
        for step in self._steps(self._call(self._api.encode_response, outputs, contexts)):
            left = yield {0: _plain(step)} if alone else {index: _plain(each) for index, each in enumerate(step)}
            if len(left) == len(batch):
                return

    def _steps(self, outputs: Any) -> Generator[Any, None, None]:
        steps = iter(outputs)
        end = object()
        while (step := self._run(next, steps, end)) is not end:
            yield step


class _LogQueue:
    """Takes the pairs of a key and a value of `LitAPI.log`, and writes them to the log."""

    def put(self, pair: tuple[str, Any]) -> None:
        """Write a line."""
        import logging  # not above: a worker process imports this module before it may load more

        logging.getLogger("litserve").info("%s: %s", *pair)


def _contexts(batch: list[Decoded]) -> list[dict[str, Any]]:
    return [each.context for each in batch]


def _plain(response: Any) -> Any:
    """Return a pydantic model as an object for JSON, and anything else as it is."""
    dump: Callable[..., Mapping[str, Any]] | None = getattr(response, "model_dump", None)
    return response if dump is None else dump(mode="json")
