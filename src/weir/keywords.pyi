"""The settings as keyword arguments, for editors and type checkers alone. Written by docs/generate.py from their declarations."""

from typing import Any, TypedDict

class CommonKeywords(TypedDict, total=False):
    """The keywords that all of these have."""

    max_batch_size: int
    """Largest batch, in rows; 1 disables batching"""
    policy: Any
    """When to dispatch a batch: greedy, size-or-delay:size=32,delay=5ms, full, control-limit:8, auto, FILE.npz, or module:Class"""
    max_queue_delay: float
    """Maximum wait: seconds that a policy may hold a request back"""
    max_queue_size: int
    """Maximum queue length, in rows; when it is full, requests are refused or in-process callers wait"""
    max_queue_cost: float | None
    """Maximum total cost of waiting requests (see Model.measure)"""
    bulk_delay: float | None
    """Seconds by which bulk work may delay other requests (default: a twentieth of the latency objective, or 0.005)"""
    capacity: int | None
    """Maximum number of rows waiting and running (default for chains: 4096)"""
    max_batch_cost: float | None
    """Maximum total cost of a batch (see Model.measure)"""
    padded: bool
    """The model pads batches, so costs are lengths"""
    max_padding: float | None
    """For padded batches: maximum padding, in units of cost"""
    padding_cost: float
    """For padded batches: cost of a padding token relative to a real one"""
    small_request_size: int
    """0 keeps arrival order; otherwise requests wait in proportion to their rows, or to their costs if padded"""
    max_overtakes: int
    """Maximum number of batches that may overtake the oldest large request"""
    workers: int | str
    """Workers per model; a range, such as 1..16 or 0..4, autoscales"""
    bulk_workers: int | None
    """Idle-priority processes for bulk work (default for text models on CPUs: as many as workers)"""
    target_load: float | None
    """With a range of workers: maximum share of their capacity to use"""
    scale_to_zero_after: float
    """With a range from 0: seconds without requests after which all workers stop"""
    worker_socket: str | None
    """Where external workers attach: unix:PATH or tcp:HOST:PORT"""
    ray_address: str | None
    """Ray cluster: HOST:PORT, or auto (default: RAY_ADDRESS, or a new local cluster)"""
    num_cpus: float
    """CPUs that Ray reserves for each worker"""
    num_gpus: float
    """GPUs that Ray reserves for each worker; 0.25 is a quarter of one"""
    resources: dict[str, float]
    """Other resources that Ray reserves for each worker (memory in bytes)"""
    placement: str
    """How Ray places workers: spread over nodes, pack onto few, or strict-spread (one per node)"""
    ray_runtime_env: str | None
    """Ray runtime environment: working_dir, py_modules, pip"""
    ray_detached: str | None
    """Keep the workers and their models on Ray when the server stops; the next server with this name takes them over"""
    device_group: str | None
    """Models with the same group take turns on a device: the device runs `workers` of their batches at once"""
    device_order: str
    """Whose turn it is in a device_group: solved (least cost, for the policy auto), oldest, longest or fair"""
    pipeline_depth: int
    """Batches that a worker holds at once; with 2 it decodes one while another runs"""
    worker_concurrency: int
    """Batches that one worker process runs at once, in threads, for models that wait for other services"""
    predict_timeout: float | None
    """Seconds that a batch may take, or a stream between two yields, before its worker is killed"""
    env: list[dict[str, str]]
    """Environment variables of the workers: one set for all, or one set each"""
    cpu_affinity: list[list[int]]
    """CPUs that workers are pinned to: one list for all, or one list each"""
    worker_kinds: list[str]
    """The kind of each worker, if their devices are of two kinds, such as a large and a small GPU: one name each"""
    threads: int | None
    """Numeric-library threads in each worker process (default: CPUs / workers)"""
    retry_in_halves: bool
    """Rerun a failed batch in halves, so that only bad items fail"""
    start_timeout: float
    """Seconds within which a worker must load and warm up"""
    arena_bytes: int
    """Shared memory in bytes for large payloads, and as much again for results; 0 disables it"""
    needs_memory: int | str | None
    """Memory that the model takes with all its workers, such as 2GB (default: as measured); for --model-memory"""
    needs_gpu_memory: int | str | None
    """The same for GPU memory, for --model-gpu-memory"""
    spin: float
    """Seconds that an idle worker polls before it sleeps"""
    drain_timeout: float
    """Seconds that accepted requests have to finish at shutdown"""
    stream_buffer: int
    """Responses buffered for a slow reader before its stream is closed"""
    backpressure: bool
    """In-process calls wait while the queue is full instead of failing"""

class ServiceKeywords(CommonKeywords, total=False):
    """The settings of weir.Service."""

    timeout: float
    """Seconds until a request expires, unless it has its own timeout"""

class InProcessKeywords(CommonKeywords, total=False):
    """The settings of weir.inprocess."""

    executor: Any
    """Where predict runs: process, thread, inline, ray, or external workers (see worker_socket)"""
    params: dict[str, Any]
    """Argument of the model's constructor: JSON, or else plain text"""
    model_control: str
    """When models of the repository are loaded: at the start, or on-demand: by their first requests"""
    model_memory: int | str | None
    """With on-demand: memory for all models together, such as 16GB; evicted models are loaded again when needed"""
    model_gpu_memory: int | str | None
    """With on-demand: the same for GPU memory, as measured (extra gpu) or stated (needs_gpu_memory)"""

class AsgiKeywords(ServiceKeywords, total=False):
    """The settings of weir.asgi."""

    executor: Any
    """Where predict runs: process, thread, inline, ray, or external workers (see worker_socket)"""
    params: dict[str, Any]
    """Argument of the model's constructor: JSON, or else plain text"""
    max_body_size: int
    """Largest request body in bytes, before and after decompression"""
    max_header_size: int
    """Largest request header section in bytes"""
    body_timeout: float
    """Seconds within which a request's body must arrive; as many again for each MiB of it"""
    max_connections: int
    """Maximum number of open connections of all kinds; beyond it, only health and metrics are answered"""
    max_waiting_bytes: int | None
    """Memory for all requests and responses in bytes; a number read from JSON counts 16 (default: an eighth of the process's memory)"""
    stream_keep_alive: float
    """Seconds of silence after which an event stream sends a comment"""
    websocket_in_flight: int
    """Running requests at which reading from a WebSocket pauses; 16 times as many if they have a timeout"""
    websocket_ping: float
    """Seconds between pings on a WebSocket"""
    compress_above: int
    """Response size in bytes above which responses are compressed, if the client accepts it"""
    protocols: list[str]
    """Additional protocol from an installed package"""
    cors_origins: list[str]
    """Origins whose web pages may call this server; * allows any"""
    liveness: str
    """What /health/live checks: process (the server responds) or models (every model can also start workers)"""
    timeout_status: int
    """HTTP status of requests that time out: 504, or 408, which alerts on 5xx miss and many clients retry"""
    explain: bool
    """Describe the batch in the headers of every response"""
    development: bool
    """Send tracebacks to callers; do not use on a public server"""
    server_name: str
    """Server name in the metadata"""
    allow_shared_memory: bool
    """Allow clients on this machine to register shared memory (/dev/shm) for tensors"""
    api_key: str | None
    """Key that every caller must send; process lists show flags, so prefer WEIR_API_KEY or a file"""
    api_key_file: str | None
    """File with API keys, one per line"""
    allow_control: bool
    """Allow admin calls from other machines without a token"""
    control_token_file: str | None
    """File with the token for admin calls"""
    allow_model_files: bool
    """Allow load calls to upload code, files and environment variables, which run on this server"""
    batch_dir: str | None
    """Directory of batch jobs and their files (default: no batch jobs)"""
    batch_max_bytes: int
    """Largest total size of the files and results of batch jobs, in bytes"""
    batch_max_file_size: int
    """Largest uploaded file, in bytes"""
    batch_max_files: int
    """Maximum number of files, including those that jobs will write"""
    batch_max_jobs: int
    """Maximum number of batch jobs; a new one replaces the oldest finished one"""
    batch_max_requests: int
    """Maximum number of requests in one batch job"""
    batch_concurrency: int
    """Maximum number of batch-job requests that run at once"""
    batch_expire_after: float
    """Seconds after which files and finished jobs are removed"""

class ServerKeywords(AsgiKeywords, total=False):
    """The settings of weir.serve and weir.running."""

    name: str | None
    """Name of the model (default: the class name in lower case)"""
    route: list[str]
    """Additional URL path for the model, next to /infer/NAME"""
    host: str
    """Address to listen on; '::' means every address, IPv6 and IPv4"""
    port: int
    """Port to listen on; 0 picks a free one"""
    uds: str | None
    """Unix socket to listen on, instead of host and port"""
    uds_mode: str
    """Octal permissions of the Unix socket; whoever can write to it controls the server"""
    idle_timeout: float
    """Seconds after which an idle connection is closed"""
    header_timeout: float
    """Seconds within which a request's headers must arrive"""
    tls_certfile: str | None
    """TLS certificate (PEM); enables TLS"""
    tls_keyfile: str | None
    """TLS private key (PEM), if it is not in the certificate file"""
    grpc_port: int | None
    """Port for gRPC; 0 picks a free one (default: no gRPC)"""
    grpc_host: str | None
    """Address for gRPC to listen on (default: that of HTTP); 0.0.0.0 includes IPv6"""
    grpc_max_message_size: int
    """Largest message from a client, in bytes"""
    grpc_keepalive: float
    """Seconds of silence after which a client is pinged"""
    grpc_keepalive_timeout: float
    """Seconds within which a client must answer a ping"""
    grpc_stream_requests: int
    """Running requests of one stream at which reading pauses"""
    frontends: dict[str, Any]
    """Frontend from an installed package, with its options as JSON or plain text"""
    model_repository: str | None
    """Model repository: a directory of MODEL/VERSION/FILE, whose models can be loaded while serving"""
    load: list[str]
    """Models to load at startup, or none (default: all)"""
    model_control: str
    """When models of the repository are loaded: at the start, or on-demand: by their first requests"""
    model_memory: int | str | None
    """With on-demand: memory for all models together, such as 16GB; evicted models are loaded again when needed"""
    model_gpu_memory: int | str | None
    """With on-demand: the same for GPU memory, as measured (extra gpu) or stated (needs_gpu_memory)"""
    watch: bool
    """Load and unload models when repository files change"""
    reload: bool
    """For development: reload a model when the file of its TARGET changes"""
    allow_pickle: bool
    """Load models from pickle files (.joblib, .pkl), which can run arbitrary code; only for files that you trust"""
    trust_type: list[str]
    """Additional type that a .skops file may contain"""
    metrics: bool
    """Collect metrics and serve them at /metrics"""
    metrics_namespace: str
    """Prefix of the metric names at /metrics"""
    triton_metrics: bool
    """Also export metrics under Triton's names (nv_inference_*)"""
    log_format: str
    """Format of log lines: text for people, json for machines"""
    log_level: str
    """Minimum severity of log lines"""
    access_log: bool
    """Log each HTTP request, and each request to a model"""
    log_file: str | None
    """File to write all log lines to, as JSON"""
    record: str | None
    """File to record request arrivals in, one per model, for weir simulate and weir bench"""
    trace_endpoint: str | None
    """OTLP endpoint that receives spans, such as http://localhost:4318"""
    trace_ratio: float | None
    """Share of requests to trace when the caller does not decide (default: from OTEL_TRACES_SAMPLER, or all)"""
    server_cpu_affinity: list[int]
    """CPUs that the server process is pinned to; for workers, see cpu_affinity"""
    fronts: int | str
    """Processes that read and write HTTP in front of one queue; auto: as many as there are CPUs without workers"""
