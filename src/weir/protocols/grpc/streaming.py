"""ModelStreamInfer: many requests under way in one stream, each with one answer or, of a streaming model, several.

Answers go back as they come, in the order of each request alone; the clients tell requests apart by their ids. The error
of one request is a message in the stream, which goes on.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from weir.errors import WeirError
from weir.protocols.account import CLAIM
from weir.protocols.grpc.call import Call, Left
from weir.protocols.grpc.calls import in_task, name_of, note, text_of
from weir.protocols.grpc.core import Handler
from weir.protocols.grpc.exchange import GrpcExchange, read_long
from weir.protocols.grpc.inference import refusal
from weir.protocols.kserve.context import KServeContext
from weir.wire.inference import InferenceResponse
from weir.wire.kserve_grpc import error_in_stream, in_stream

# Whoever sets this parameter of a request gets a last answer without outputs, if the last one with outputs did not say so.
WANTS_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"


class Streaming:
    """The handler of ModelStreamInfer. At most `most` requests of one stream are under way."""

    def __init__(self, site: KServeContext, most: int, *, development: bool) -> None:
        self._site = site
        self._most = most
        self._development = development
        self._refusing = asyncio.Event()

    def refuse(self) -> None:
        """Read no more requests; streams end once those under way have their answers."""
        self._refusing.set()

    def handler(self) -> Handler:
        """Return what gRPC calls."""
        return Handler(in_task(self._serve, development=self._development), takes_stream=True)

    async def _serve(self, call: Call, _: bytes) -> None:
        one = OneStream(self._site, call, self._most, development=self._development)
        reading = asyncio.create_task(one.read())
        refusing = asyncio.create_task(self._refusing.wait())
        try:
            await asyncio.wait((reading, refusing), return_when=asyncio.FIRST_COMPLETED)
            ended = reading.done()
            if not ended:
                reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await one.finish()
        finally:
            for task in (reading, refusing, *one.tasks):
                task.cancel()
        if not ended:  # the client would have asked for more
            raise refusal()


class OneStream:
    """One call: reads requests, runs each in a task of its own, and writes what comes. They are charged to the account of `site`."""

    def __init__(self, site: KServeContext, call: Call, most: int, *, development: bool) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._site = site
        self._call = call
        self._development = development
        self._room = asyncio.Semaphore(most)
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._claim = site.account.claim()
        self._fewer = asyncio.Event()  # a request has ended

    async def read(self) -> None:
        """Take requests until the client sends no more."""
        while True:
            await self._room.acquire()
            while self.tasks and self._claim.held_bytes > self._site.account.max_connection_bytes:
                self._fewer.clear()
                await self._fewer.wait()
            body = await self._call.read()
            if body is None:
                return
            task = asyncio.create_task(self._answer(body))
            del body  # it is the task's, which drops it
            self.tasks.add(task)
            task.add_done_callback(self._ended)

    async def finish(self) -> None:
        """Return when all that was read has its answers."""
        if self.tasks:
            await asyncio.wait(self.tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._room.release()
        self._fewer.set()

    async def _answer(self, body: bytes) -> None:
        """Answer one request. What it holds is gone before its error, if it has one, waits for the client to read."""
        size = len(body)
        try:
            self._claim.take(size)
        except WeirError as error:
            failure: bytes | None = self._failure(error, "", "")
        else:
            try:
                with self._site.account.claim() as claim:
                    CLAIM.set(claim)
                    failure = await self._answered(body)
            finally:
                self._claim.give(size)
        del body
        if failure is not None:
            with suppress(Left):
                await self._write(failure)

    async def _answered(self, body: bytes) -> bytes | None:
        """Write the answers to one request; return the message that says why that failed, if it did."""
        model = request_id = ""
        try:
            parsed, read = await read_long(self._site, self._call, body)
            model, request_id = parsed.message.model_name, parsed.message.id
            exchange = GrpcExchange(self._site, self._call, parsed, read)
            sent = 0
            async with aclosing(answers_to(exchange)) as answers:
                async for answer in answers:
                    message = in_stream(answer)
                    del answer
                    sent += await self._write_counted(message)
            exchange.transferred(len(body), sent)
        except Left:
            return None
        except Exception as error:
            return self._failure(error, model, request_id)
        return None

    def _failure(self, error: Exception, model: str, request_id: str) -> bytes:
        note(error)
        return error_in_stream(text_of(error, development=self._development), model, request_id, name_of(error))

    async def _write_counted(self, message: bytes) -> int:
        self._claim.take(len(message))
        try:
            return await self._write(message)
        finally:
            self._claim.give(len(message))

    async def _write(self, message: bytes) -> int:
        """Write a message after those before. Raises Left, also where the client does not read for too long: the call ends then."""
        try:
            async with asyncio.timeout(self._site.http.body_timeout), self._writing:
                await self._call.write(message)
        except TimeoutError:
            self._call.cancel()
            raise Left from None
        return len(message)


async def answers_to(exchange: GrpcExchange) -> AsyncGenerator[bytes, None]:
    """Yield the bodies of the answers to one request; each says whether it is the last."""
    request = exchange.request
    wants_final = request.parameters.get(WANTS_FINAL) is True
    said_final = False
    async with aclosing(exchange.stream(request)) as parts:
        async for part in parts:
            part.response.parameters = {**part.response.parameters, FINAL: part.last}
            said_final = part.last
            answer = await exchange.write(part.response)
            del part  # nor does it wait beside its own bytes for the client to read
            yield answer
            del answer
    if wants_final and not said_final:
        service = exchange.service
        yield await exchange.write(
            InferenceResponse(service.name, [], version=service.version, id=request.id, parameters={FINAL: True})
        )
