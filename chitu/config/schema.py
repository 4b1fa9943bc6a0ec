"""The one schema of a topology file: every key with its unit and meaning. Values only; reading is `load.py`.

Key paths are those of the YAML (`dp_config.router.pd_disaggregation.transport`); unknown keys are refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

Port = Annotated[int, Meta(ge=0, le=65535)]
"""0: picked by the OS and published at coordination."""
Positive = Annotated[int, Meta(ge=1)]
Parallel = Annotated[int, Meta(ge=1, le=4096)]
"""Processes or threads: more are a slip, and nothing that counts them should count for years."""
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


AUTO_DEVICES = ("auto",)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section."""


class ModelConfig(Section, frozen=True):
    path: str = ""
    """Hugging Face checkpoint folder: config.json, safetensors, tokenizer."""
    served_name: str | None = None
    """Name in the API; the folder's name where unset."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on CPUs, whatever the checkpoint has, the checkpoint's own on CUDA. `bfloat16` on CPUs halves the
    memory; prompts are faster where the CPU has AMX, tokens are slower."""
    max_model_len: Positive | None = None
    """Tokens (prompt plus output) of one request; the model's own limit where unset."""
    prefill_attention: Literal["auto", "flashinfer", "paged"] = "auto"
    """On CUDA, of prompts beyond the recorded steps: FlashInfer's kernels or our own paged one. `auto`: whole prompts
    by torch's library; the rest by FlashInfer where it is installed and fits, else by our own."""


class DiskConfig(Section, frozen=True):
    """Where pages are kept that host memory has no room for, and that a restart survives."""

    path: str | None = None
    """Folder; each instance writes to one of its own in it, by its name, and reads all. Unset: none."""
    max_bytes: Positive = 64 << 30
    """Of the files of each instance; the least recently used go first."""


class StoreConfig(Section, frozen=True):
    """A Mooncake Store, by which instances share pages that they have computed. Nothing in it is authenticated: trusted
    networks only."""

    master: str | None = None
    """`host:port` of `mooncake_master`. Unset: none."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """What pages move over."""
    device: str = ""
    """RDMA device names, comma separated."""
    segment_bytes: Annotated[int, Meta(ge=0)] = 0
    """Memory that each P and unified instance gives to the store, and takes along when it ends. 0: others have it, such
    as `mooncake_client` processes."""


class CacheConfig(Section, frozen=True):
    page_size: Positive = 16
    """Tokens a page."""
    num_pages: Positive | None = None
    """Pages of an instance; unset: from `memory_fraction`."""
    memory_fraction: Fraction | None = None
    """CPU: of free RAM (at most 4 GiB), for the pages of all instances of a host; unset: 0.25. GPU: of the whole card,
    for weights, steps and pages of all instances on it; unset: 0.9."""
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """What K and V are stored as. `auto`: the model's dtype. `fp8_e4m3`: a byte a number, with a scale for each token
    and head."""
    prefix_cache: bool = True
    """Full pages of prompts and outputs stay on the instances that have them until their room is wanted; a later prompt
    that begins alike is computed, and moved from P to D, from there on."""
    host_bytes: Annotated[int, Meta(ge=0)] = 0
    """Host memory (pinned beside a GPU) of each P and unified instance, in bytes: the prefix cache goes on there when
    the pool has no room. With disk or store of each D, too, 1 GiB at most. 0: none."""
    load_timeout_s: Seconds = 1.0
    """The longest that a prompt waits for pages from outside the pool; what is missing then is computed. A disk or
    store of which a call takes longer is left out for a while."""
    disk: DiskConfig = field(default_factory=DiskConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    num_aux_slots: Positive | None = None
    """Logits rows for requests between P and D; unset: 2 x max_running_requests."""


class SchedulerConfig(Section, frozen=True):
    max_waiting_requests: Positive = 1024
    """Requests of an instance's queues that compute nothing yet; one more is refused with `capacity`."""
    max_running_requests: Positive = 64
    """Requests decoding at once on an instance; also its executor slots."""
    max_batched_tokens: Positive = 2048
    """Prompt tokens computed in one step, over all requests. Where prompts are computed on GPUs and it is unset: 8192,
    with unified instances 2048."""
    chunk_size: Positive = 512
    """Prompt tokens of one request computed in one step. On GPUs and unset: `max_batched_tokens`."""
    reserved_decode_tokens: Annotated[int, Meta(ge=0)] = 64
    """Room to grow that D keeps per running request when it admits a new one."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Launch a step before the tokens of the one before are read. `auto`: on CUDA."""
    threads: Parallel | None = None
    """CPU threads of an instance's math; unset: the host's cores divided by the instances on it."""


class DeadlineConfig(Section, frozen=True):
    """Longest stay in a state before it is an error."""

    bootstrap_s: Seconds = 10.0
    """P knows a request, D has not announced it, counted from the moment D was free to; D waits for P's address."""
    queue_s: Seconds = 30.0
    """Waiting for pages or a slot."""
    transfer_s: Seconds = 30.0
    """From the announcement to the last byte (it includes P's compute)."""
    heartbeat_interval_s: Seconds = 0.5
    """Between two reports of an instance, or of the router."""
    lease_s: Seconds = 3.0
    """Silence after which an instance is dead."""
    router_s: Seconds = 30.0
    """Silence of the router after which P and D end what they run for it; it gets their errors if it comes back."""
    step_s: Seconds = 60.0
    """One step of computing, or a rank's copy of a page to or from a tier. What takes longer ends its process."""
    retry_interval_s: Seconds = 0.5
    """Unacknowledged status, join and abort messages are repeated so often."""
    drain_s: Seconds = 4.0
    """How long a process that was told to end finishes what runs."""


class RetryConfig(Section, frozen=True):
    """What the router does with a request that its pair failed."""

    max_attempts: Positive = 3
    """Tries of one request at most, the first one included, and those aside that a broken connection ended; 1: a
    failure reaches the client at once."""
    continue_streams: bool = True
    """Also after the first token: another pair computes prompt and emitted tokens again, and D goes on behind them."""


class BreakerConfig(Section, frozen=True):
    """Per instance: after failures in a row it gets no requests for a while, then one as a probe (half-open)."""

    failures: Positive = 3
    """In a row, that open it."""
    open_s: Seconds = 5.0
    """Doubled by every probe that fails, up to `max_open_s`."""
    max_open_s: Seconds = 60.0
    """Longest pause between probes."""


class AdmissionConfig(Section, frozen=True):
    """Early rejection: a request that would wait too long is told so at once."""

    max_queue_s: Seconds | None = None
    """Longest predicted wait before a prompt is computed; beyond it 503 with Retry-After. Unset, and at most: two
    thirds of `deadlines.queue_s` and `deadlines.transfer_s`, in which the wait passes. With an aim for the first token
    (2 s, say), about half of that."""
    requests_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Per API key (per client address where no keys are configured); 0: without limit. Beyond it 429. Each of several
    `workers` counts for itself."""
    burst: Positive = 32
    """Requests that may come at once within `requests_per_s`."""


class FaultConfig(Section, frozen=True):
    """Transfers that are broken on purpose, to see what notices. For tests; everything is off by default."""

    zero_page: Annotated[int, Meta(ge=0)] | None = None
    """What P writes into this page of D's pool (K and V of all layers) arrives as zeros."""
    flip_byte_every: Annotated[int, Meta(ge=0)] = 0
    """Of every Nth write of a P rank that brings KV, one byte arrives with all bits flipped. 0: of none."""
    flip_logits_every: Annotated[int, Meta(ge=0)] = 0
    """The same of every Nth logits row."""
    delay_ms: Annotated[float, Meta(ge=0)] = 0.0
    """Delay before every write begins; past its timeout the write fails."""
    stall_every: Annotated[int, Meta(ge=0)] = 0
    """Every Nth write, of KV or of logits, hangs until its timeout and fails; nothing of it arrives."""

    def describe(self) -> str:
        """The faults that are on, as `key=value`; empty where none is."""
        default = FaultConfig()
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return " ".join(f"{name}={value}" for name, value in values if value != getattr(default, name))


class PDDisaggregationConfig(Section, frozen=True):
    coordination_port: Port = 29800
    """ZMQ: P and D join, leave and are drained here."""
    metadata_sync_port: Port = 29801
    """ZMQ: the router publishes the cluster view (members and their addresses)."""
    bootstrap_port: Port = 8080
    """HTTP: where each P is, for tools."""
    transport: Literal["auto", "shm", "cuda_ipc", "mooncake", "nixl"] = "auto"
    """`auto`: between processes of one host shm, or cuda_ipc for GPU memory; Mooncake otherwise."""
    mooncake_protocol: Literal["auto", "tcp", "rdma"] = "auto"
    """What Mooncake writes over. `auto`: RDMA where the node has an active device, which for GPU memory must reach it
    (nvidia_peermem or dma-buf), else TCP; nodes are taken for alike."""
    ib_device: str = ""
    """RDMA device names for Mooncake, comma separated; empty: found by Mooncake."""
    transfer: Literal["auto", "direct", "staged"] = "auto"
    """`direct`: every page is written to its place. `staged`: pages are gathered, sent in few large pieces and
    scattered on arrival. `auto`: whichever is faster, by a table of what was measured."""
    staging_mb: Positive = 128
    """Staging memory of an instance (MiB), where it is needed at all."""
    staging_segment_mb: Positive = 16
    """One piece at most (MiB)."""
    transfer_threads: Parallel = 1
    """Transfer threads of P. On GPUs a thread waits until a layer is computed; with two or more, the logits of another
    request need not."""
    cluster_key: str = ""
    """Secret of the cluster, at least 16 characters: ZMQ is then encrypted and authenticated (CURVE), bootstrap and
    admin calls need a token made of it. `CHITU_CLUSTER_KEY` overrides it; keep it out of files that others can read."""
    verify_kv: Literal["off", "sample", "all"] = "off"
    """Checksums of the KV pages that arrived, against those of P: of none, of some pages a request, or of all. The
    logits row always has one."""
    verify_compute: Literal["off", "sample", "all"] = "off"
    """A second P computes the prompt of no request, of one in 100, or of each, once it was answered. A P whose logits
    are wrong is named in the log and drained. Wants two P."""
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)


class InstanceConfig(Section, frozen=True):
    """One torchrun."""

    host: str = "127.0.0.1"
    """Address at which the router and the peers reach it."""
    port: Port = 0
    """Request port."""
    devices: tuple[str, ...] = AUTO_DEVICES
    """`auto`: the node's next `tp_size` GPUs that it may use, in the order of the topology, or CPUs where it has none.
    Else one device per TP rank, `cpu` or `cuda:N`: the Nth of those GPUs. Several instances may name one."""
    tp_size: Parallel = 1
    """Ranks (tensor parallelism)."""
    threads: Parallel | None = None
    """CPU threads of this instance; over `scheduler.threads`."""
    num_pages: Positive | None = None
    """Over `cache.num_pages`."""
    memory_fraction: Fraction | None = None
    """Of each GPU that it uses, for its weights, steps and pages; unset: an equal part of `cache.memory_fraction`."""


PolicyName = Literal["round_robin", "least_loaded", "power_of_two", "prefix_affinity"]
DecodePolicyName = Literal["round_robin", "least_loaded", "power_of_two"]


class KeptRequestsConfig(Section, frozen=True):
    """Requests that outlive the router: what runs at its end goes on with the next one that has this folder."""

    dir: str | None = None
    """Folder that both see, for instance on a cluster's file system; unset: what runs at the end fails. Its files have
    prompts and answers, and are readable by this user alone."""
    max_requests: Positive = 1024
    """In the folder, and taken up by a router at once."""
    max_mb: Positive = 256
    """MiB of the files in the folder."""
    max_age_s: Seconds = 86400.0
    """Seconds from a request's first end of a router on; then it is removed, read or not."""


class RouterConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    """Address at which P and D reach the router, and at which it listens."""
    http_host: str | None = None
    """Address at which the HTTP API listens, and nothing else: `0.0.0.0` for all of the machine's. Unset: `host`."""
    port: Port = 21003
    """HTTP: the API, probes, metrics, the page."""
    stats_port: Port = 29600
    """ZMQ: load, heartbeats and failures from P and D."""
    token_port: Port = 29700
    """ZMQ: tokens from D."""
    workers: Parallel = 1
    """API processes behind `port`, for more HTTP, tokenising and streaming than one core can do. 1: the router is one
    process. With more, the first is the router, which starts the others, and process i has the token port `token_port`
    + i (any free one if that is 0)."""
    policy: PolicyName = "prefix_affinity"
    """How P and D are chosen. `prefix_affinity` is about P (where a prompt's beginning was computed before, if that is
    worth the load there; else the least loaded); D is then the least loaded."""
    prefill_policy: PolicyName | None = None
    """Over `policy`, for P and for unified instances."""
    decode_policy: DecodePolicyName | None = None
    """Over `policy`, for D."""
    max_in_flight: Positive = 4096
    """Requests at once in the whole router; more get 429. Each of several `workers` may have its equal part."""
    max_tokens_in_flight: Positive = 32 << 20
    """Prompt tokens of these requests, so that long prompts cannot take all memory: a token is four bytes here, and
    four in each message to P and D. More get 429; a body that has more by itself 400. Divided among `workers`, too."""
    max_body_bytes: Positive = 2 << 20
    """Of one request; more get 413. A prompt of 262,144 tokens fits. Contexts that are
    longer, or batches that are larger, need more."""
    max_total_body_bytes: Positive = 256 << 20
    """Of all bodies that are being received or read, beyond the first 64 KiB of each, in the whole router; what
    would be more gets 503. Each of several `workers` may have its equal part."""
    request_timeout_s: Seconds = 600.0
    """Of a whole request, all its tries and tokens; then it ends with an error, a stream too."""
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    """Of bodies, that nobody knows (docs/api.md has those that are known). `warn`: they are left out, and the answer's
    header X-Chitu-Warning names the first."""
    cors_origins: tuple[str, ...] = ()
    """Web pages whose scripts may use the API from a browser, as `https://host:port`; `*`: all. Empty: none but the
    router's own. An operator's calls are left out."""
    api_keys: tuple[str, ...] = ()
    """Requests need one of them (`Authorization: Bearer KEY`); empty: nobody is asked."""
    api_key_salts: tuple[str, ...] = ()
    """One for each of `api_keys`, in their order: keys with the same one share cached pages. Empty: no two keys do, so
    that nobody learns from a first token's time what another one has asked."""
    otlp_endpoint: str = ""
    """Base URL of an OpenTelemetry collector (OTLP over HTTP), such as `http://127.0.0.1:4318`: it gets a trace of each
    request. Wants the extra `otel`, whose `OTEL_*` variables say the rest (sampling, headers, batches). Empty: none."""
    kept_requests: KeptRequestsConfig = field(default_factory=KeptRequestsConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    pd_disaggregation: PDDisaggregationConfig = field(default_factory=PDDisaggregationConfig)
    prefill_schedulers: tuple[InstanceConfig, ...] = ()
    decode_schedulers: tuple[InstanceConfig, ...] = ()
    unified_schedulers: tuple[InstanceConfig, ...] = ()


class DPConfig(Section, frozen=True):
    scheduler_base_port: Port | None = None
    """Request port of the scheduler process that reads this (one per torchrun); over its `port`."""
    router: RouterConfig = field(default_factory=RouterConfig)


class LogConfig(Section, frozen=True):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The least that is logged. `DEBUG`: also what each step of an instance did."""
    modules: tuple[str, ...] = ()
    """Levels of single packages and modules below `chitu/`, such as `kv_transfer=DEBUG` or `router.attempts=ERROR`."""
    format: Literal["text", "json"] = "text"
    """`json`: one object a line, with `time`, `process`, `level`, `module`, `message`, `request_id` where the line is
    about one request, and `traceback`."""
    dir: str | None = None
    """Folder of per-process logs of `chitu serve` and `chitu node`; unset: a new one under the temporary folder, which
    is removed at the end unless a process died."""
    max_mb: Positive = 64
    """MiB that a process's log may have; beyond it goes on empty, and NAME.log.1 keeps what was in it until the next
    time."""


class TraceConfig(Section, frozen=True):
    """Trace records: what router, P and D saw of a request, for `chitu trace`. They have token ids of prompts and
    answers."""

    sample: Share = 0.0
    """Share of the requests that are traced without being asked to; 0.01: one in a hundred. A request with the header
    `X-Chitu-Trace: 0` is not."""
    by_header: bool = True
    """Whoever may ask for an answer may have it traced, by `X-Chitu-Trace: 1`."""
    dir: str | None = None
    """Folder on the router's machine, with a file of each process; unset: one under the temporary folder, which a
    launcher removes at its end."""
    max_mb: Positive = 64
    """MiB that a process's file may have; beyond it goes on empty, and NAME.jsonl.1 keeps what was in it until the next
    time."""


class Topology(Section, frozen=True):
    """A whole cluster: what the YAML file says, with defaults filled in."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dp_config: DPConfig = field(default_factory=DPConfig)
    log: LogConfig = field(default_factory=LogConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
