"""Forms of requests: what small ones share that differ in nothing but the bytes of their tensors.

Most clients send one model the same message over and over, but for its raw tensors, which they write last. What was found out about
the first of them, by reading it, checking it and looking the model's tensors up, holds for all others: of those only the bytes of
the tensors are read. The same goes for their answers.
"""

import weakref
from typing import TYPE_CHECKING, Any

import numpy

from weir.protocols.fastlane.head_cache import HeadMemo
from weir.protocols.grpc.exchange import Writing
from weir.serving.inference import QueueEntry, response_of
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_grpc import raw_at_end, response_pieces
from weir.wire.tensors import DTYPES, Arrays

if TYPE_CHECKING:
    from weir.serving.service import Service

LONGEST = 8 << 10  # bytes of a message; of larger ones the bytes themselves take longer than all the rest
_MOST_LENGTHS = 1024  # of messages that are told apart
_MOST_HEADS = 4  # lengths of heads, for messages of one length
_BYTES = DTYPES["BYTES"]
_MOST_ANSWERS = 64  # shapes of answers to requests of one form


class Form:
    """What requests to one service have in common. `work` is that of the first one: others have other arrays."""

    __slots__ = (
        "_answers", "_dtypes", "_names", "_request", "_generation", "_size_bytes", "_tags", "_tensors", "model", "version", "work",
    )  # fmt: skip

    def __init__(
        self, body: bytes, request: InferenceRequest, service: "Service", work: QueueEntry, raw: list[tuple[int, int, int]]
    ) -> None:  # fmt: skip
        """Take the first request, and where in its `body` each of its raw tensors has its field, its bytes and its end."""
        self.model, self.version, self.work = request.model, request.version, work
        self._generation = weakref.ref(service.generation)
        self._request = InferenceRequest(request.model, [], version=request.version, outputs=request.outputs)
        self._size_bytes = len(body)
        self._tensors = [
            (tensor.name, DTYPES[tensor.datatype], tensor.array.shape, begin, end)
            for tensor, (_, begin, end) in zip(request.inputs, raw, strict=True)
        ]
        self._tags = [(body[start:begin], start) for start, begin, _ in raw]
        asked = None if request.outputs is None else {output.name for output in request.outputs}
        outputs = [tensor for tensor in service.model.outputs if asked is None or tensor.name in asked]
        self._names = [tensor.name for tensor in outputs]
        self._dtypes = [DTYPES[tensor.datatype] for tensor in outputs]
        self._answers: dict[tuple[tuple[int, ...], ...], list[bytes]] = {}

    def fits(self, body: bytes) -> bool:
        """Tell whether the message `body`, which has the head of this form, has its tensors too."""
        if len(body) != self._size_bytes:
            return False
        return all(body.startswith(tag, start) for tag, start in self._tags)

    def serves(self, service: "Service") -> bool:
        """Tell whether this is what requests to `service` are, and it has not been loaded anew since."""
        return self._generation() is service.generation

    def arrays(self, body: bytes) -> Arrays:
        """Return the tensors of a message that fits. They cannot be written to."""
        return {name: numpy.ndarray(shape, dtype, body[begin:end]) for name, dtype, shape, begin, end in self._tensors}

    def respond(self, service: "Service", output: Any) -> bytes | Writing:
        """Return the answer to a request that ended with `output`: its body, or what is to write it. Raises what `response_of` raises."""
        if type(output) is dict and all(map(output.__contains__, self._names)):
            arrays = [output[name] for name in self._names]
            pieces = self._answers.get(tuple([array.shape for array in arrays]))
            if pieces is not None and [array.dtype for array in arrays] == self._dtypes:
                parts = [part for piece, array in zip(pieces, arrays, strict=True) for part in (piece, array.tobytes())]
                return b"".join(parts)
        response = response_of(service, self._request, [self.work.kind], [output])
        self._learn(response)
        return Writing.of(response)

    def _learn(self, response: InferenceResponse) -> None:
        """Remember how answers of these shapes are written, if they are small and all numbers."""
        arrays = [tensor.array for tensor in response.outputs]
        is_small = bool(arrays) and sum([array.nbytes for array in arrays]) <= LONGEST
        if is_small and len(self._answers) < _MOST_ANSWERS and _BYTES not in self._dtypes:
            self._answers[tuple([array.shape for array in arrays])] = response_pieces(response)


class Forms:
    """A bounded memory of forms, which are known from the second request on."""

    def __init__(self) -> None:
        self._known: HeadMemo[Form] = HeadMemo()
        self._lengths: dict[int, tuple[int, ...]] = {}  # of heads, by the lengths of messages

    def find(self, body: bytes) -> Form | None:
        """Return the form of the request in `body`, if it is known."""
        for length in self._lengths.get(len(body), ()):
            form = self._known.find(body[:length])
            if form is not None and form.fits(body):
                return form
        return None

    def learn(self, body: bytes, request: InferenceRequest, service: "Service", work: QueueEntry) -> None:
        """Remember the form of a request whose `work` is all that it is, if others may have it."""
        if len(body) > LONGEST or request.id or request.parameters or request.without_batch or not _is_plain(request):
            return
        raw = raw_at_end(body, len(request.inputs))
        if raw is not None:
            head = body[: raw[0][0]]
            self._known.offer(head, Form(body, request, service, work._replace(payload=None), raw))
            self._remember(len(body), len(head))

    def _remember(self, length: int, head: int) -> None:
        heads = self._lengths.get(length, ())
        if head in heads:
            return
        if len(self._lengths) >= _MOST_LENGTHS:
            self._lengths.clear()
        self._lengths[length] = (head, *heads)[:_MOST_HEADS]


def _is_plain(request: InferenceRequest) -> bool:
    """Tell whether all of a request besides its shapes are bytes of numbers."""
    return (
        bool(request.inputs)
        and all(tensor.datatype != "BYTES" and tensor.array.size and not tensor.parameters for tensor in request.inputs)
        and not any(output.parameters for output in request.outputs or ())
    )
