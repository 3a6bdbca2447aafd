"""The settings as keyword arguments, for editors and type checkers. Written by docs/generate.py from their declarations."""

from typing import Any, TypedDict


class CommonKeywords(TypedDict, total=False):
    """What all of these have."""

    max_batch_size: int
    """Largest batch, in rows; 1 switches batching off"""
    policy: Any
    """When a batch is cut: greedy, size-or-delay:size=32,delay=5ms, full, control-limit:8, auto, FILE.npz, or module:Class"""
    max_queue_delay: float
    """Longest wait that any policy may impose, in seconds"""
    max_queue_size: int
    """Rows that may wait; more are refused or wait outside"""
    max_queue_cost: float | None
    """Largest sum of costs that may wait, such as tokens (see Model.measure); more is refused or waits outside"""
    bulk_delay: float | None
    """Seconds that bulk requests (priority below 0) may add to others: a batch of bulk work takes at most so long. Unless said, a twentieth of the latency objective, or 0.005 without one"""
    capacity: int | None
    """Rows that may be under way at once, waiting and with workers; more are refused or wait outside. Of a chain: in all its steps together (4096 unless said)"""
    max_batch_cost: float | None
    """Largest sum of costs in a batch (see Model.measure)"""
    padded: bool
    """The model pads a batch to its longest: costs are lengths, a batch costs its rows times its longest"""
    max_padding: float | None
    """Where padded: most padding in a batch, in units of cost; best half of what a batch costs beyond them"""
    padding_cost: float
    """Where padded: what padding costs, as a share of what as many tokens do; less than 1 where the model computes less for it"""
    small_request_size: int
    """0 keeps arrival order; with any other number requests wait in proportion to their rows, or, where padded, to their costs"""
    max_overtakes: int
    """Batches that may go before the oldest of the requests larger than a row"""
    workers: int | str
    """Worker processes of each model; or the fewest and the most, as in 1..16: then as many as the load needs (0..4: none without requests)"""
    target_load: float | None
    """With a range of workers: share of what they can serve that is used at most; without it, what the policy's promise about latency allows, or the knee of the cost"""
    scale_to_zero_after: float
    """With workers from 0 on: seconds without a request after which there is none"""
    worker_socket: str | None
    """Where external workers attach: unix:PATH or tcp:HOST:PORT"""
    ray_address: str | None
    """The Ray that runs the workers: HOST:PORT, or auto for the one of this machine; without it RAY_ADDRESS, or else a Ray started for this server"""
    num_cpus: float
    """CPUs that Ray sets aside for each worker"""
    num_gpus: float
    """GPUs that Ray sets aside for each worker, 0.25 for a quarter"""
    resources: dict[str, float]
    """Other resources that Ray sets aside for each worker"""
    placement: str
    """How Ray places workers: spread over the nodes, pack on few, or strict-spread: at most one of this model on a node"""
    ray_runtime_env: str | None
    """The runtime environment of the workers on Ray, as JSON: working_dir, py_modules, pip"""
    pipeline_depth: int
    """Batches that a worker holds at once; 2 hides decoding behind predict"""
    predict_timeout: float | None
    """A batch that runs longer ends its worker; of a streaming model, from one yield to the next"""
    env: list[dict[str, str]]
    """Environment of each worker: one dict for all, or one per worker (CUDA_VISIBLE_DEVICES)"""
    cpu_affinity: list[list[int]]
    """CPU numbers of each worker: one list for all, or one per worker"""
    threads: int | None
    """Threads of numeric libraries in each worker (OMP_NUM_THREADS and others)"""
    retry_in_halves: bool
    """If a batch raises an error, run it again in halves, so that only bad items fail"""
    load_niceness: int | None
    """How much lower the priority of a new worker is while it loads, 0 to 19 (more than 10 for 20 seconds at most); without it 19 for models loaded while others serve"""
    start_timeout: float
    """Longest time for a worker to load and warm up"""
    arena_bytes: int
    """Shared memory for large payloads, and again for large results; 0 switches it off"""
    spin: float
    """Seconds that an idle worker polls, yielding the CPU, before it sleeps; it sleeps at once if batches usually come later; 0 saves power"""
    drain_timeout: float
    """Time that accepted requests get to finish when stopping"""
    stream_buffer: int
    """Answers of a stream that are kept for a slow reader; a stream whose reader stays further behind is ended"""
    backpressure: bool
    """Calls in process wait while the queue is full; otherwise they get Overloaded"""
    loop_spin: float
    """Seconds before and after an expected or actual batch or request for which the event loop polls instead of sleeping; takes CPU, saves some tenths of a millisecond per batch"""


class ServiceKeywords(CommonKeywords, total=False):
    """The settings of weir.Service."""

    timeout: float
    """Time until a request without a timeout of its own expires"""


class InProcessKeywords(CommonKeywords, total=False):
    """The settings of weir.inprocess."""

    executor: Any
    """Where predict runs: process, thread or inline; ray: in actors of a Ray cluster; external: in workers that attach from outside (worker_socket)"""
    params: dict[str, Any]
    """Argument of the model's constructor: JSON, or else plain text"""


class AsgiKeywords(ServiceKeywords, total=False):
    """The settings of weir.asgi."""

    executor: Any
    """Where predict runs: process, thread or inline; ray: in actors of a Ray cluster; external: in workers that attach from outside (worker_socket)"""
    params: dict[str, Any]
    """Argument of the model's constructor: JSON, or else plain text"""
    max_body_size: int
    """Largest request body in bytes, also after decompression"""
    max_header_size: int
    """Largest head of a request, in bytes"""
    body_timeout: float
    """Longest time for the body of a request to arrive"""
    max_connections: int
    """Connections of every kind that may be open; more are refused"""
    max_waiting_bytes: int | None
    """Bytes that requests and answers of all clients may hold at once; without it an eighth of the memory that the process may have"""
    stream_keep_alive: float
    """A stream of events that is silent for this long gets a comment, so that it is not taken for dead"""
    websocket_in_flight: int
    """Requests that a WebSocket may have under way; while it has, nothing is read from it. Requests that state a timeout do not wait for that: 16 times as many may be under way, and others are refused"""
    websocket_ping: float
    """Time between two pings on a WebSocket"""
    compress_above: int
    """Answers larger than this many bytes are compressed for clients that ask for it"""
    protocols: list[str]
    """Speak a protocol that an installed package brings, beside those that Weir has"""
    cors_origins: list[str]
    """Origins whose pages may call this server; * for any"""
    liveness: str
    """What /health/live tells: process: that it answers; models: also that none of its models has lost all workers and cannot start another, so that the orchestrator restarts the server"""
    explain: bool
    """Explain the batch in the headers of every answer, as X-Explain: 1 does for one"""
    development: bool
    """Show callers the tracebacks of errors; never where strangers can call"""
    server_name: str
    """Name of the server in its metadata"""
    allow_shared_memory: bool
    """Let clients on this machine register regions of shared memory (/dev/shm) for inputs and outputs"""
    api_key: str | None
    """Key that every caller must send; a list of processes shows flags, so set it as the variable or in a file"""
    api_key_file: str | None
    """File with the keys, one a line, of which every caller must send one"""
    allow_control: bool
    """Let callers from other machines control this server, without a token"""
    control_token_file: str | None
    """File with the token that callers who control this server must send, also from this machine"""
    allow_model_files: bool
    """Let those who may load models send code, files and variables with them, which run on this machine"""


class ServerKeywords(ServiceKeywords, total=False):
    """The settings of weir.serve and weir.running."""

    executor: Any
    """Where predict runs: process, thread or inline; ray: in actors of a Ray cluster; external: in workers that attach from outside (worker_socket)"""
    name: str | None
    """Name of the model (default: its class name in lower case)"""
    params: dict[str, Any]
    """Argument of the model's constructor: JSON, or else plain text"""
    route: list[str]
    """The model's own path, besides /infer/NAME"""
    host: str
    """Address to listen on"""
    port: int
    """Port to listen on; 0 takes any free one"""
    uds: str | None
    """Path of a Unix socket to listen on instead of host and port"""
    uds_mode: str
    """Permissions of that socket, octal: who may write to it may call, and control the server"""
    max_body_size: int
    """Largest request body in bytes, also after decompression"""
    max_header_size: int
    """Largest head of a request, in bytes"""
    idle_timeout: float
    """A connection without a request is closed after this long"""
    header_timeout: float
    """Longest time for the head of a request to arrive"""
    body_timeout: float
    """Longest time for the body of a request to arrive"""
    max_connections: int
    """Connections of every kind that may be open; more are refused"""
    max_waiting_bytes: int | None
    """Bytes that requests and answers of all clients may hold at once; without it an eighth of the memory that the process may have"""
    stream_keep_alive: float
    """A stream of events that is silent for this long gets a comment, so that it is not taken for dead"""
    websocket_in_flight: int
    """Requests that a WebSocket may have under way; while it has, nothing is read from it. Requests that state a timeout do not wait for that: 16 times as many may be under way, and others are refused"""
    websocket_ping: float
    """Time between two pings on a WebSocket"""
    compress_above: int
    """Answers larger than this many bytes are compressed for clients that ask for it"""
    protocols: list[str]
    """Speak a protocol that an installed package brings, beside those that Weir has"""
    cors_origins: list[str]
    """Origins whose pages may call this server; * for any"""
    tls_certfile: str | None
    """Certificate (PEM); switches TLS on"""
    tls_keyfile: str | None
    """Private key (PEM), if not in the certificate's file"""
    liveness: str
    """What /health/live tells: process: that it answers; models: also that none of its models has lost all workers and cannot start another, so that the orchestrator restarts the server"""
    explain: bool
    """Explain the batch in the headers of every answer, as X-Explain: 1 does for one"""
    development: bool
    """Show callers the tracebacks of errors; never where strangers can call"""
    grpc_port: int | None
    """Port that gRPC listens on, beside HTTP; 0 takes any free one; without it there is no gRPC"""
    grpc_host: str | None
    """Address that gRPC listens on, if not that of HTTP"""
    grpc_max_message_size: int
    """Largest message that a client may send"""
    grpc_keepalive: float
    """A client that has been silent for this long is asked whether it is still there"""
    grpc_keepalive_timeout: float
    """Longest time for it to answer; its calls are cancelled then"""
    grpc_stream_requests: int
    """Requests of one stream that may be under way; more are not read until some have ended"""
    doors: dict[str, Any]
    """Open a frontend that an installed package brings, with its options: JSON, or else plain text"""
    server_name: str
    """Name of the server in its metadata"""
    allow_shared_memory: bool
    """Let clients on this machine register regions of shared memory (/dev/shm) for inputs and outputs"""
    api_key: str | None
    """Key that every caller must send; a list of processes shows flags, so set it as the variable or in a file"""
    api_key_file: str | None
    """File with the keys, one a line, of which every caller must send one"""
    allow_control: bool
    """Let callers from other machines control this server, without a token"""
    control_token_file: str | None
    """File with the token that callers who control this server must send, also from this machine"""
    allow_model_files: bool
    """Let those who may load models send code, files and variables with them, which run on this machine"""
    model_repository: str | None
    """Folder of models, MODEL/VERSION/FILE, that can be loaded while serving"""
    load: list[str]
    """Model to load at the start, or all, or none; without it all are loaded"""
    watch: bool
    """Load models of the repository when their files change, and unload models whose folders are deleted"""
    allow_pickle: bool
    """Load models from pickled files (.joblib, .pkl), which can run any code that their maker put into them"""
    trust_type: list[str]
    """Type that a .skops file may contain, besides those that skops knows to be safe"""
    metrics: bool
    """Count what happens and show it at /metrics"""
    metrics_namespace: str
    """First word of the names of metrics at /metrics"""
    triton_metrics: bool
    """Also show them under Triton's names (nv_inference_*)"""
    log_format: str
    """Format of log lines: text for people, json for machines"""
    log_level: str
    """Least severe log lines shown"""
    access_log: bool
    """Log each HTTP request of any path, and each request for a model of any protocol, when it ends"""
    log_file: str | None
    """File that also gets every log line, as JSON"""
    record: str | None
    """File for the arrivals of requests, to simulate or replay them; one file per model if there are several"""
    trace_endpoint: str | None
    """Where the spans of requests and batches go: URL of an OTLP receiver over HTTP, such as http://localhost:4318"""
    trace_ratio: float
    """Share of requests that are traced, among those whose callers have not decided"""
    server_cpu_affinity: list[int]
    """CPUs for the server's own process; workers use cpu_affinity, or all CPUs that the server had at its start"""
    batch_dir: str | None
    """Directory of batch jobs and their files; with it the server offers /v1/files and /v1/batches"""
    batch_max_bytes: int
    """What all files and answers of batch jobs may take together, in bytes"""
    batch_max_file_size: int
    """Largest uploaded file, in bytes"""
    batch_max_requests: int
    """Most requests of one batch job"""
    batch_concurrency: int
    """Requests of batch jobs that are under way at once"""
    batch_expire_after: float
    """Age at which files and finished jobs are removed, in seconds"""
