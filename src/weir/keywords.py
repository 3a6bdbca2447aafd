"""The settings as keyword arguments, for editors and type checkers. Written by docs/generate.py from their declarations."""

from typing import Any, TypedDict


class CommonKeywords(TypedDict, total=False):
    """What all of these have."""

    max_batch_size: int
    """Largest batch, in rows; 1 switches batching off"""
    policy: Any
    """When to cut a batch: greedy, size-or-delay:size=32,delay=5ms, full, control-limit:8, auto, FILE.npz, or module:Class"""
    max_queue_delay: float
    """Longest wait that a policy may impose, in seconds"""
    max_queue_size: int
    """Maximum queue length, in rows; beyond it, requests are refused or callers wait"""
    max_queue_cost: float | None
    """Largest sum of costs (see Model.measure) that may wait"""
    bulk_delay: float | None
    """Seconds that bulk work may delay others (default: a twentieth of the latency objective, or 0.005)"""
    capacity: int | None
    """Rows that may wait and run together (default for chains: 4096)"""
    max_batch_cost: float | None
    """Largest sum of costs in a batch (see Model.measure)"""
    padded: bool
    """The model pads batches: costs are lengths"""
    max_padding: float | None
    """Where padded: most padding in a batch, in units of cost"""
    padding_cost: float
    """Where padded: cost of a padding token as a share of a real one's"""
    small_request_size: int
    """0 keeps the order of arrival; else requests wait in proportion to rows, or costs if padded"""
    max_overtakes: int
    """Batches that may overtake the oldest large request"""
    workers: int | str
    """Workers per model; a range, such as 1..16 or 0..4, follows the load"""
    bulk_workers: int | None
    """Processes of idle priority for bulk work (default for texts on CPUs: as many as workers)"""
    target_load: float | None
    """Largest share of the workers' capacity to use, with a range"""
    scale_to_zero_after: float
    """With workers from 0 on: seconds without a request until none is left"""
    worker_socket: str | None
    """Where external workers attach: unix:PATH or tcp:HOST:PORT"""
    ray_address: str | None
    """Ray cluster: HOST:PORT, or auto (default: RAY_ADDRESS, or a Ray of its own)"""
    num_cpus: float
    """CPUs that Ray reserves for each worker"""
    num_gpus: float
    """GPUs that Ray reserves for each worker; 0.25: a quarter"""
    resources: dict[str, float]
    """Other resources that Ray reserves for each worker (memory in bytes)"""
    placement: str
    """How Ray places workers: spread over nodes, pack on few, or strict-spread, one per node"""
    ray_runtime_env: str | None
    """Runtime environment on Ray: working_dir, py_modules, pip"""
    ray_detached: str | None
    """Keep the workers on Ray, models loaded, when the server ends; the next server of this name takes them over"""
    pipeline_depth: int
    """Batches that a worker holds; 2 hides decoding"""
    worker_concurrency: int
    """Batches that one worker process runs at once, in threads: for a model that waits"""
    predict_timeout: float | None
    """Longest time of a batch, or between two yields, before its worker is ended"""
    env: list[dict[str, str]]
    """Environment of the workers: one for all, or one each"""
    cpu_affinity: list[list[int]]
    """CPU numbers of the workers: one list for all, or one each"""
    threads: int | None
    """Threads of numeric libraries in each worker process (default: CPUs / workers)"""
    retry_in_halves: bool
    """Run a failed batch again in halves, so that only bad items fail"""
    load_niceness: int | None
    """Niceness of a loading worker, 0 to 19 (default: 19 while others serve)"""
    start_timeout: float
    """Longest time for a worker to load and warm up"""
    arena_bytes: int
    """Shared memory for large payloads, and again for results; 0: none"""
    spin: float
    """Seconds that an idle worker polls before it sleeps"""
    drain_timeout: float
    """Time for accepted requests to finish at the end"""
    stream_buffer: int
    """Answers kept for a slow reader before its stream ends"""
    backpressure: bool
    """Calls in process wait while the queue is full, instead of failing"""
    loop_spin: float
    """Seconds around expected events in which the event loop polls instead of sleeping; costs CPU"""


class ServiceKeywords(CommonKeywords, total=False):
    """The settings of weir.Service."""

    timeout: float
    """Time until a request without its own timeout expires"""


class InProcessKeywords(CommonKeywords, total=False):
    """The settings of weir.inprocess."""

    executor: Any
    """Where predict runs: process, thread, inline, ray, or external workers (see worker_socket)"""
    params: dict[str, Any]
    """Argument of the model's constructor: JSON, or else plain text"""


class AsgiKeywords(ServiceKeywords, total=False):
    """The settings of weir.asgi."""

    executor: Any
    """Where predict runs: process, thread, inline, ray, or external workers (see worker_socket)"""
    params: dict[str, Any]
    """Argument of the model's constructor: JSON, or else plain text"""
    max_body_size: int
    """Largest request body in bytes, also after decompression"""
    max_header_size: int
    """Largest head of a request, in bytes"""
    body_timeout: float
    """Longest time to receive a request's body"""
    max_connections: int
    """Open connections of every kind"""
    max_waiting_bytes: int | None
    """Bytes that all requests and answers may hold (default: an eighth of the process's memory)"""
    stream_keep_alive: float
    """Silence after which a stream of events gets a comment"""
    websocket_in_flight: int
    """Running requests at which a WebSocket is read no further; 16 times as many with a timeout"""
    websocket_ping: float
    """Time between two pings on a WebSocket"""
    compress_above: int
    """Bytes above which answers are compressed on request"""
    protocols: list[str]
    """Also speak a protocol of an installed package"""
    cors_origins: list[str]
    """Origins whose pages may call this server; * for any"""
    liveness: str
    """What /health/live checks: process, that the server answers; models, also that every model can start workers"""
    timeout_status: int
    """HTTP status of a request that timed out: 408, or 504, which alerts on 5xx count and clients do not retry"""
    explain: bool
    """Explain the batch in every answer's headers"""
    development: bool
    """Show callers tracebacks; never where strangers can call"""
    server_name: str
    """Name of the server in its metadata"""
    allow_shared_memory: bool
    """Let clients on this machine register shared memory (/dev/shm) for tensors"""
    api_key: str | None
    """Key that every caller must send; prefer the variable or a file, because process lists show flags"""
    api_key_file: str | None
    """File with keys, one a line"""
    allow_control: bool
    """Let callers from other machines control this server, without a token"""
    control_token_file: str | None
    """File with the token for controlling the server"""
    allow_model_files: bool
    """Let load calls bring code, files and variables, which run here"""
    batch_dir: str | None
    """Directory of batch jobs and their files (default: no batch jobs)"""
    batch_max_bytes: int
    """Bytes of all files and answers of batch jobs"""
    batch_max_file_size: int
    """Largest uploaded file, in bytes"""
    batch_max_files: int
    """Most files, those that jobs will write included"""
    batch_max_jobs: int
    """Most batch jobs; a new one replaces the oldest that has ended"""
    batch_max_requests: int
    """Most requests of one batch job"""
    batch_concurrency: int
    """Running requests of batch jobs"""
    batch_expire_after: float
    """Seconds until files and finished jobs are removed"""


class ServerKeywords(ServiceKeywords, total=False):
    """The settings of weir.serve and weir.running."""

    executor: Any
    """Where predict runs: process, thread, inline, ray, or external workers (see worker_socket)"""
    name: str | None
    """Name of the model (default: the class name in lower case)"""
    params: dict[str, Any]
    """Argument of the model's constructor: JSON, or else plain text"""
    route: list[str]
    """The model's own path, besides /infer/NAME"""
    host: str
    """Address to listen on; ::: every address, of IPv6 and IPv4"""
    port: int
    """Port to listen on; 0: any free one"""
    uds: str | None
    """Unix socket to listen on, instead of host and port"""
    uds_mode: str
    """Octal permissions of that socket; who may write to it controls the server"""
    max_body_size: int
    """Largest request body in bytes, also after decompression"""
    max_header_size: int
    """Largest head of a request, in bytes"""
    idle_timeout: float
    """Time after which an idle connection is closed"""
    header_timeout: float
    """Longest time to receive a request's head"""
    body_timeout: float
    """Longest time to receive a request's body"""
    max_connections: int
    """Open connections of every kind"""
    max_waiting_bytes: int | None
    """Bytes that all requests and answers may hold (default: an eighth of the process's memory)"""
    stream_keep_alive: float
    """Silence after which a stream of events gets a comment"""
    websocket_in_flight: int
    """Running requests at which a WebSocket is read no further; 16 times as many with a timeout"""
    websocket_ping: float
    """Time between two pings on a WebSocket"""
    compress_above: int
    """Bytes above which answers are compressed on request"""
    protocols: list[str]
    """Also speak a protocol of an installed package"""
    cors_origins: list[str]
    """Origins whose pages may call this server; * for any"""
    tls_certfile: str | None
    """Certificate (PEM); switches TLS on"""
    tls_keyfile: str | None
    """Private key (PEM), if not with the certificate"""
    liveness: str
    """What /health/live checks: process, that the server answers; models, also that every model can start workers"""
    timeout_status: int
    """HTTP status of a request that timed out: 408, or 504, which alerts on 5xx count and clients do not retry"""
    explain: bool
    """Explain the batch in every answer's headers"""
    development: bool
    """Show callers tracebacks; never where strangers can call"""
    grpc_port: int | None
    """Port for gRPC; 0: any free one (default: no gRPC)"""
    grpc_host: str | None
    """Address that gRPC listens on, if not that of HTTP; 0.0.0.0 is IPv6 too"""
    grpc_max_message_size: int
    """Largest message that a client may send"""
    grpc_keepalive: float
    """Silence after which a client is pinged"""
    grpc_keepalive_timeout: float
    """Longest time to answer the ping"""
    grpc_stream_requests: int
    """Requests of one stream that may run before reading stops"""
    doors: dict[str, Any]
    """Open a package's frontend, with options as JSON or plain text"""
    server_name: str
    """Name of the server in its metadata"""
    allow_shared_memory: bool
    """Let clients on this machine register shared memory (/dev/shm) for tensors"""
    api_key: str | None
    """Key that every caller must send; prefer the variable or a file, because process lists show flags"""
    api_key_file: str | None
    """File with keys, one a line"""
    allow_control: bool
    """Let callers from other machines control this server, without a token"""
    control_token_file: str | None
    """File with the token for controlling the server"""
    allow_model_files: bool
    """Let load calls bring code, files and variables, which run here"""
    model_repository: str | None
    """Folder of models, MODEL/VERSION/FILE, that can be loaded while serving"""
    load: list[str]
    """Models to load at the start, or none (default: all)"""
    watch: bool
    """Load and unload models when files in the repository change"""
    reload: bool
    """For development: load a model again when the file of its TARGET changes"""
    allow_pickle: bool
    """Load models from pickled files (.joblib, .pkl), which can run any code that their maker put into them"""
    trust_type: list[str]
    """Further type that a .skops file may contain"""
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
    """Log each HTTP request, and each request to a model"""
    log_file: str | None
    """File for all log lines, as JSON"""
    record: str | None
    """File for the arrivals of requests, one per model, to simulate or replay"""
    trace_endpoint: str | None
    """OTLP receiver over HTTP for spans, such as http://localhost:4318"""
    trace_ratio: float | None
    """Share of requests to trace, unless their callers decide (default: as OTEL_TRACES_SAMPLER says, or all)"""
    server_cpu_affinity: list[int]
    """CPUs of the server's own process; workers have cpu_affinity"""
    batch_dir: str | None
    """Directory of batch jobs and their files (default: no batch jobs)"""
    batch_max_bytes: int
    """Bytes of all files and answers of batch jobs"""
    batch_max_file_size: int
    """Largest uploaded file, in bytes"""
    batch_max_files: int
    """Most files, those that jobs will write included"""
    batch_max_jobs: int
    """Most batch jobs; a new one replaces the oldest that has ended"""
    batch_max_requests: int
    """Most requests of one batch job"""
    batch_concurrency: int
    """Running requests of batch jobs"""
    batch_expire_after: float
    """Seconds until files and finished jobs are removed"""
