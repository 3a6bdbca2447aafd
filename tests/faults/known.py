"""Sixty faults of the kind that a change of the code makes: ten in each of six parts. `python -m tests.faults` says which tests find them.

They were written before the tests were made fewer, spread over the modules of each part, and not chosen by what is tested.
"""

from tests.faults.planting import Fault, forgets, gives, mistakes, off_by_one, skips, takes

FAULTS = {
    # wire
    "rows-of-tensors-differ": Fault("weir.wire.tensors:_check_rows", value=gives()),
    "extreme-element-refused": Fault("weir.wire.tensors:_check_elements", off_by_one("extreme")),
    "ids-of-all-servers-alike": Fault("weir.wire.frames:make_ids", mistakes("salt", "0")),
    "failed-ids-ignored": Fault("weir.wire.frames:decode_reply", mistakes("wrong", "()")),
    "bytes-after-the-last-tensor": Fault("weir.wire.kserve_binary:_Rest.end", value=gives()),
    "tensor-twice": Fault("weir.wire.kserve_json:refuse_duplicates", skips("add")),
    "event-without-limit": Fault("weir.wire.sse:EventParser.feed", takes("_max_event_bytes", "False")),
    "overload-taken-for-too-large": Fault("weir.wire.status:error_of_grpc", mistakes("for_now", "False")),
    "id-of-bad-message-lost": Fault("weir.wire.websocket:id_of", value=gives("")),
    "cause-of-error-lost": Fault("weir.wire.cells:unpack_error", forgets("error.__cause__")),
    # protocols
    "claim-adopted-and-kept": Fault("weir.protocols.account:Claim.adopt", forgets("other.held_bytes")),
    "long-body-earns-no-time": Fault("weir.protocols.account:Pace._came", value=gives()),
    "held-bytes-unpublished": Fault("weir.protocols.account:SharedAccount.held_bytes", skips("put")),
    "origin-not-checked": Fault("weir.protocols.access:allowed", value=gives(True)),
    "retry-after-rounded-down": Fault("weir.protocols.response:retry_after", mistakes("math.ceil", "int")),
    "family-of-types-ignored": Fault("weir.protocols.response:_weight", mistakes("family", "candidate")),
    "challenge-lost": Fault("weir.protocols.response:error_headers", takes("Unauthorized", "False")),
    "payload-kept-to-the-end": Fault("weir.protocols.exchange:Gathering._ended", skips("drop_payload")),
    "full-queue-of-rows-refused": Fault("weir.protocols.entries:_checked", off_by_one("most")),
    "longer-timeout-counts": Fault("weir.protocols.entries:scheduled", mistakes("min", "max")),
    # frontends
    "request-id-of-a-page-lost": Fault("weir.frontends.http.asgi:identified", takes("MAX_REQUEST_ID_LENGTH", "False")),
    "keep-alive-without-pause": Fault("weir.frontends.http.asgi:EventStream._write", forgets("self._last")),
    "browser-not-asked-for-the-key": Fault("weir.frontends.http.asgi:_wants_page", value=gives(False)),
    "unread-bytes-counted-as-none": Fault(
        "weir.frontends.http.fast.connection:ResponseWriter.pause_writing", forgets("self._unread")
    ),
    "date-of-the-past": Fault("weir.frontends.http.fast.shared:Heads.tick", skips("self.plain.clear")),
    "refused-message-stays-charged": Fault("weir.frontends.websocket:Session.forget", skips("give")),
    "dropped-answer-stays-charged": Fault("weir.frontends.websocket:Session._post", skips("give")),
    "ended-call-counted": Fault("weir.frontends.grpc.core:Intake.end", skips("count_call")),
    "call-left-goes-on": Fault("weir.frontends.grpc.call:IncomingCall._leave", skips("on_left")),
    "line-end-in-the-log": Fault("weir.frontends.http.access_log:_printable", value=lambda _: str),
    # workers
    "limit-lost-by-a-pause": Fault("weir.workers.timer:TimeLimit.go_on", skips("arm")),
    "written-channel-stays-awake": Fault("weir.workers.process.channel:Channel._send_more", skips("remove_writer")),
    "held-results-only-grow": Fault("weir.workers.arena:Results._settle", forgets("self.unsettled_bytes")),
    "warm-up-is-measured": Fault("weir.workers.run.runner:Runner.starting", forgets("metrics.muted")),
    "fatal-error-of-one-item": Fault("weir.workers.run.steps:each", takes("isinstance(error, fatal)", "False")),
    "padded-with-zeros-only": Fault("weir.workers.run.tensors:_pad_value", value=gives(0)),
    "restarts-not-counted": Fault(
        "weir.workers.process.supervision:SupervisedWorker._start_again", forgets("self.restarts")
    ),
    "limit-of-a-stream-not-renewed": Fault(
        "weir.workers.process.supervision:SupervisedWorker._went_on", value=gives()
    ),
    "lost-worker-keeps-its-turn": Fault("weir.workers.turns:DeviceTurns.worker_lost", skips("gave_up")),
    "long-wait-of-a-remote-worker": Fault("weir.workers.remote:Attachment._respond", forgets("self._wait")),
    # text_server
    "ended-text-counted-as-open": Fault("weir.text_server.encoder:Encoder._leave_one", skips("end")),
    "hopeless-texts-accepted": Fault("weir.text_server.encoder:Encoder._can_meet_deadline", value=gives(True)),
    "debt-forgotten-on-leaving": Fault("weir.text_server.requests:CallerQueue.leave", forgets("self._away[key]")),
    "place-among-distinct-texts": Fault(
        "weir.text_server.requests:EncodeRequest.first_index", value=lambda _: lambda self, index: index
    ),
    "one-more-than-top-n": Fault("weir.text_server.forms:ranking", mistakes("top_n", "top_n and top_n + 1")),
    "longest-client-id-refused": Fault("weir.text_server.forms:check_client", off_by_one("_MAX_CLIENT_ID")),
    "interval-since-the-start": Fault(
        "weir.text_server.metrics:TextClients.received_before", takes("self._last is not None", "False")
    ),
    "room-given-back-to-nobody": Fault(
        "weir.text_server.bert_as_service.zeromq:Publisher.made", skips("_wake_waiting")
    ),
    "blank-half-of-a-pair": Fault("weir.text_server.bert_as_service.frames:_split_pair", skips("strip", "True")),
    "version-of-the-other-api": Fault("weir.text_server.protocols.cohere:_meta", mistakes("version", "'2'")),
    # catalog
    "fewer-than-no-workers": Fault("weir.catalog.manager:WorkerEndpoints.resized", mistakes("max", "min")),
    "failure-never-forgotten": Fault("weir.catalog.manager:ModelStates.forget", value=gives()),
    "failed-read-remembered": Fault("weir.catalog.manager:FirstReads._outcome", skips("pop")),
    "priority-lost-in-a-chain": Fault("weir.catalog.chains:ItemWalk._call", mistakes("asked.priority", "0")),
    "other-paths-go-on": Fault("weir.catalog.chains:ItemWalk._branch", skips("end_tasks", "asyncio.sleep(0)")),
    "ten-before-two": Fault("weir.catalog.repository.folder:versions_in", mistakes("version_order", "str")),
    "loaded-while-written": Fault(
        "weir.catalog.repository.folder:Settling.settled", takes("present == signature", "True")
    ),
    "milliseconds-as-seconds": Fault("weir.catalog.loading:_scaled", takes("factor is None", "True")),
    "load-waits-after-the-end": Fault("weir.catalog.residency:Residency.ended", skips("_tell")),
    "smallest-preferred-size": Fault("weir.catalog.repository.triton:_batching", mistakes("max", "min")),
}  # fmt: skip
