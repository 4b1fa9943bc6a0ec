"""The only schema of a topology file: every key with its unit and meaning. Values only; `load.py` reads the file.

Key paths are those of the YAML (`dp_config.router.pd_disaggregation.transport`); unknown keys are refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

Port = Annotated[int, Meta(ge=0, le=65535)]
"""A port; 0: the OS picks it, and coordination publishes it."""
Positive = Annotated[int, Meta(ge=1)]
Parallel = Annotated[int, Meta(ge=1, le=4096)]
"""Number of processes or threads. The limit catches typing errors."""
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
"""A time. The limit refuses `.inf`, with which no deadline can be computed."""
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Priority = Annotated[int, Meta(ge=-(1 << 31) + 1, le=0)]
"""Bound of priorities. 0 is the default of requests, which no bound may refuse."""


WeightForm = Literal["keep", "dequantise"]

AUTO_DEVICES = ("auto",)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section."""


class ModelConfig(Section, frozen=True):
    path: str = ""
    """Hugging Face checkpoint folder: config.json, safetensors, tokenizer."""
    served_name: str | None = None
    """Name in the API; unset: the folder's name."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters: a name in the API, and a folder as PEFT writes it (adapter_config.json,
    adapter_model.safetensors). A request chooses one as its `model`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on CPUs, for any checkpoint, and the checkpoint's own on CUDA. `bfloat16` on CPUs halves
    the KV cache; prefill is faster if the CPU has AMX, decode is slower. Weights of 16 bits stay so with float32,
    too."""
    max_model_len: Positive | None = None
    """Maximum tokens (prompt plus output) of one request; unset: the model's own limit."""
    sampling_defaults: Literal["model", "none"] = "model"
    """`model`: a request without temperature, top_p, top_k or repetition_penalty has the one that the checkpoint's
    generation_config.json publishes. `none`: temperature 1, and no other."""
    code: Literal["auto", "own", "transformers"] = "auto"
    """Code that computes the model: our own, which is faster, or the modules of the installed transformers, which know
    more architectures. `auto`: our own if it has all that the checkpoint asks for."""
    weights: WeightForm = "keep"
    """Quantised weights. `keep`: as small as they are stored, where kernels compute with such: most forms on CPUs with
    a C compiler; on GPUs those of 4 bits, and FP8 from compute capability 8.9 on. `dequantise`: numbers of `dtype`."""
    weights_from: Literal["folder", "neighbour", "auto"] = "folder"
    """Where an instance reads the bytes of its weights. `folder`: from `path`. `neighbour`: from an instance of the
    cluster that serves the same ones, and from `path` what none has. `auto`: from the quicker of both, as it measures
    while it reads. With the last two it also sends weights to others (docs/weights.md)."""
    images: Literal["auto", "off"] = "auto"
    """`auto`: requests may have images, if the model has a vision tower that the installed transformers computes.
    `off`: only the text part is loaded."""
    prefill_attention: Literal["auto", "paged"] = "auto"
    """Attention on CUDA for prompts longer than the recorded steps. `auto`: torch's library for whole prompts, our own
    paged kernel for the rest; `paged`: our own for all."""


class DiskConfig(Section, frozen=True):
    """Disk tier of the prefix cache: pages that do not fit in host memory. They survive a restart."""

    path: str | None = None
    """Folder; each instance writes to its own subfolder, named after it, and reads all. A second process of that name
    (another cluster's) takes NAME.1. Unset: no disk tier."""
    max_bytes: Positive = 64 << 30
    """Maximum size of the files of each instance; the least recently used are deleted first."""


class StoreConfig(Section, frozen=True):
    """A store through which instances share computed pages: a Mooncake Store, or one of your own. A Mooncake Store has
    no authentication: use trusted networks only."""

    master: str | None = None
    """`host:port` of `mooncake_master`. Unset: no store."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Protocol that moves the pages."""
    device: str = ""
    """RDMA device names, comma separated."""
    segment_bytes: Annotated[int, Meta(ge=0)] = 0
    """Memory that each P and unified instance contributes to the store until it ends. 0: other processes contribute it,
    such as `mooncake_client`."""
    plugin: str | None = None
    """In place of Mooncake, a store of your own: `module:Class`, which each instance imports, or the name of an entry
    point of the group `chitu.page_stores`. Its code runs in the instances."""
    options: dict[str, str | int] = field(default_factory=dict)
    """What `plugin` is made with."""


class KVEventsConfig(Section, frozen=True):
    """KV events of the instances with a `kv_events_port`: what enters and leaves their prefix caches, in vLLM's format.
    Whoever reads them reads the tokens of all requests (docs/gateway.md)."""

    encoding: Literal["map", "array"] = "map"
    """Form of each event: `map`, as vLLM from 0.24 on; `array`, for readers of earlier ones."""
    topic: str = "kv@{host}:{port}@{model}"
    """Topic of all messages, with these names replaced: `{host}` and `{port}` where the instance takes requests,
    `{name}` (P0, ...), and `{model}`, the name in the API. llm-d reads the pod and the model from this form."""
    replay_messages: Positive = 1000
    """Messages, the newest, that readers can have again; each takes some 40 KB at most."""


class CacheConfig(Section, frozen=True):
    page_size: Positive = 16
    """Tokens per page."""
    num_pages: Positive | None = None
    """Pages of an instance; unset: derived from `memory_fraction`."""
    memory_fraction: Fraction | None = None
    """CPU: share of the RAM that host and control group leave (at most 4 GiB) for the pages of all instances of a host;
    unset: 0.25. GPU: share of the whole card for weights, steps and pages of all instances on it; unset: 0.9."""
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Dtype of K and V in the cache. `auto`: the model's dtype. `fp8_e4m3`: one byte per number, with a scale for each
    token and head."""
    prefix_cache: bool = True
    """Keep full pages of prompts and outputs on their instances until the space is needed. Of a later prompt with the
    same prefix, only the rest is computed and moved from P to D. With recurrent state (linear attention, Mamba,
    `window_state`) a prompt goes on behind the last full page of an earlier prompt alone, and all is moved."""
    host_bytes: Annotated[int, Meta(ge=0)] = 0
    """Host memory (pinned beside a GPU) of each P and unified instance, in bytes: second tier of the prefix cache when
    the pool is full. With disk or store each D has one, too, of 1 GiB at most. 0: none."""
    load_timeout_s: Seconds = 1.0
    """Longest wait of a prompt for pages from outside the pool; missing pages are then computed. A disk or store with a
    slower call is not used for a while."""
    disk: DiskConfig = field(default_factory=DiskConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    events: KVEventsConfig = field(default_factory=KVEventsConfig)
    num_aux_slots: Positive | None = None
    """Number of logits rows for requests between P and D; unset: 2 x max_running_requests."""
    window_state: bool = False
    """Keep K and V of layers with a window (gpt-oss, Gemma 3, ...) for the window alone: in a row of each request
    instead of in pages. More requests fit and less is moved, but such a model lacks what models with recurrent state
    lack: most of the prefix cache and its tiers. No effect on models without windows."""
    image_rows: Positive | None = None
    """Number of rows (one is a token of an image) for features of images: those that prompts wait for, and as many as
    fit of earlier ones, for later requests. Unset: 16384, and not more than max_model_len. No effect without
    vision."""
    host_image_bytes: Annotated[int, Meta(ge=0)] = 0
    """Host memory (pinned beside a GPU) of each P and unified instance, in bytes, for features of images that gave up
    their rows: a later prompt with such an image loads them. 0: none. On CPUs, `image_rows` is host memory already."""
    num_state_slots: Positive | None = None
    """Number of rows for the recurrent state of requests (models with linear attention or Mamba layers, and with
    `window_state` those with windows; no effect on others): each request that computes, runs or is between P and D
    holds one, a prompt with several choices one more; the others keep states of prompts for the prefix cache. Unset: as
    many as can be needed, in at most half of the memory for pages."""


class SchedulerConfig(Section, frozen=True):
    max_waiting_requests: Positive = 1024
    """Maximum requests in an instance's queues that compute nothing yet; one more is refused with `capacity`."""
    max_running_requests: Positive = 64
    """Maximum requests decoding at once on an instance; also its executor slots."""
    max_batched_tokens: Positive = 2048
    """Maximum prompt tokens computed in one step, over all requests. If unset and prompts are computed on GPUs: 8192,
    or 2048 with unified instances."""
    chunk_size: Positive = 512
    """Maximum prompt tokens of one request in one step. If unset, on GPUs: `max_batched_tokens`."""
    reserved_decode_tokens: Annotated[int, Meta(ge=0)] = 64
    """Tokens that D keeps free for the growth of each running request when it admits a new one."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Launch a step before the tokens of the previous one are read. `auto`: on CUDA."""
    graphs: Literal["auto", "off"] = "auto"
    """Recorded steps (CUDA graphs). `auto`: on CUDA, of models that our own code computes and that have no recurrent
    state or sparse attention. `off`: none, if the capture of a library's calls fails."""
    lanes: Literal["auto", 1, 2] = "auto"
    """In how many lanes a unified instance computes. 1: chunks of prompts compute in the steps that decode. 2: they
    compute beside these, each on its share of the cores: streams wait less for prompts, and prompts take longer. On
    CPUs with two threads at least, of single ranks, and of models that our own code computes, without recurrent state,
    LoRA adapters or a layer that drafts. `auto`: 1."""
    speculation: Literal["auto", "text", "mtp", "off"] = "auto"
    """Speculative decoding: draft tokens are computed ahead in the step of a request and kept where they are the tokens
    that are drawn anyway, so no answer changes. `text`: drafts are what followed the newest tokens earlier in the
    prompt or the answer (prompt lookup), or a request's `prediction`; as many as pay by measured prices. `mtp`: a
    layer of the model guesses a token, too (multi-token prediction, of checkpoints in the form of DeepSeek-V3).
    `auto`: `text` on CPUs. Models with recurrent state, or with `cache.window_state`, draft nothing."""
    max_draft_tokens: Annotated[int, Meta(ge=1, le=15)] = 12
    """Maximum tokens of a draft."""
    mtp_tokens: Annotated[int, Meta(ge=1, le=15)] = 1
    """With `speculation: mtp`, tokens that the layer drafts in a row: beyond the first it goes on from its own."""
    threads: Parallel | None = None
    """CPU threads of an instance's computation; unset: the usable cores divided by the instances of the host."""


class DeadlineConfig(Section, frozen=True):
    """Longest time in a state before it is an error."""

    bootstrap_s: Seconds = 10.0
    """P waits for D's announcement of a request, counted from when D was able to send it; D waits for P's address."""
    queue_s: Seconds = 30.0
    """Waiting time for pages or a slot."""
    transfer_s: Seconds = 30.0
    """Longest silence of a transfer: time in which P computes and writes nothing of a request that D has announced, or
    of what comes before it. A slow prompt may take longer, up to `router.request_timeout_s`."""
    heartbeat_interval_s: Seconds = 0.5
    """Interval between two reports of an instance, or of the router."""
    lease_s: Seconds = 3.0
    """Time without a message after which an instance is dead."""
    router_s: Seconds = 30.0
    """Time without a message from the router after which P and D end its requests; it gets the errors if it returns."""
    step_s: Seconds = 60.0
    """Longest layer of a step of computing, or copy of a page by a rank to or from a tier. The process ends if it takes
    longer."""
    retry_interval_s: Seconds = 0.5
    """Interval at which unacknowledged status, join and abort messages are repeated."""
    drain_s: Seconds = 4.0
    """Time that a process has to finish running requests after a signal to end. Set it to the longest answer: what is
    not finished by then fails."""
    role_change_s: Seconds = 10.0
    """Time that running requests have to end on an instance that changes its role (`chitu role`). Those that take
    longer go on elsewhere, from the token that they have reached."""
    drain_delay_s: NotNegative = 0.0
    """Time after a signal in which the router still accepts and serves requests, while `/health` answers 503. Behind a
    load balancer: the time that it takes to notice. `drain_s` begins after it."""


class RetryConfig(Section, frozen=True):
    """Retry of a request after a failure of its pair."""

    max_attempts: Positive = 3
    """Maximum attempts of one request, including the first, not counting those that a broken connection ended; 1: a
    failure reaches the client at once."""
    continue_streams: bool = True
    """Retry also after the first token: another pair computes prompt and emitted tokens again, and D continues."""


class BreakerConfig(Section, frozen=True):
    """Circuit breaker of each instance: after failures in a row it gets no requests for a while, then one as a probe
    (half-open)."""

    failures: Positive = 3
    """Failures in a row that open the breaker."""
    open_s: Seconds = 5.0
    """Time that it stays open; every failed probe doubles it, up to `max_open_s`."""
    max_open_s: Seconds = 60.0
    """Longest time between probes."""


class AdmissionConfig(Section, frozen=True):
    """Admission control: a request that would wait too long is rejected at once."""

    max_queue_s: Seconds | None = None
    """Longest predicted wait before a prompt is computed; beyond it the answer is 503 with Retry-After. Default and
    upper bound: two thirds of `deadlines.queue_s`, which includes this wait. With a target for the first token (such as
    2 s), use about half of that."""
    requests_per_s: NotNegative = 0.0
    """Rate limit per API key (per client address if no keys are configured), with 429 beyond it; 0: no limit. Each of
    several routers counts separately, as with the limits below."""
    burst: Positive = 32
    """Requests that may arrive at once within `requests_per_s`."""


class SLOConfig(Section, frozen=True):
    """Targets of requests that give none of their own (`slo` in the body). The router serves each request in the way
    that costs least of those that keep them."""

    ttft_s: Seconds | None = None
    """Longest time to the first token. Unset: no target."""
    tpot_s: Seconds | None = None
    """Longest time from token to token. With it D may compute prompts, too: short ones, and those of which it has most
    in its cache. A step of D or of a unified instance then has no more prompt tokens than fit into this time, beside
    the requests that decode. Unset: D computes no prompt, and `scheduler` alone bounds steps."""


class CanaryConfig(Section, frozen=True):
    """The share of requests that goes to one revision of the instances from the router's start on; `chitu canary`
    changes it while it runs."""

    revision: str = ""
    """Label of the revision. Empty: each revision that can serve alone gets requests by the number of its
    instances."""
    share: Share = 0.0
    """Its share, while other revisions can serve: 0 none, 1 all."""


class PDDisaggregationConfig(Section, frozen=True):
    coordination_port: Port = 29800
    """ZMQ: join, leave and drain of P and D."""
    metadata_sync_port: Port = 29801
    """ZMQ: the router publishes the cluster view (members and their addresses)."""
    bootstrap_port: Port = 8080
    """HTTP: addresses of each P, for tools."""
    transport: Literal["auto", "shm", "cuda_ipc", "mooncake", "nixl"] = "auto"
    """Transport of KV. `auto`: between processes of one host shm, or cuda_ipc for GPU memory; Mooncake otherwise."""
    mooncake_protocol: Literal["auto", "tcp", "rdma"] = "auto"
    """Protocol of Mooncake. `auto`: RDMA if the node has an active device, which for GPU memory must be able to access
    it (nvidia_peermem or dma-buf), else TCP. All nodes are assumed to be alike."""
    ib_device: tuple[str, ...] = ()
    """Names of the RDMA devices that Mooncake and NIXL may use; empty: all with an active port. For each piece of
    memory the library takes those near its GPU or NUMA node."""
    gid_index: Annotated[int, Meta(ge=0)] | None = None
    """Index of the address (GID) that RoCE ports use, on every node; unset: the library's choice. `chitu doctor` lists
    them."""
    transport_env: dict[str, str | int] = field(default_factory=dict)
    """Environment variables of Mooncake (`MC_...`) and NIXL (`UCX_...`, `NIXL_...`) in P and D. They override those of
    the process; those that chitu sets itself are rejected."""
    transfer: Literal["auto", "direct", "staged"] = "auto"
    """`direct`: every page is written to its destination. `staged`: pages are gathered, sent in few large pieces and
    scattered on arrival. `auto`: the faster one, by a table of measurements."""
    staging_mb: Positive = 128
    """Staging memory of an instance (MiB), if it needs any."""
    staging_segment_mb: Positive = 16
    """Maximum size of one piece (MiB)."""
    transfer_threads: Parallel = 1
    """Transfer threads of P. On GPUs a thread waits until a layer is computed; with two or more, the logits of another
    request need not wait for it."""
    cluster_key: str = ""
    """Secret of the cluster, at least 16 characters: ZMQ is then encrypted and authenticated (CURVE), and bootstrap and
    admin calls need a token derived from it. `CHITU_CLUSTER_KEY` overrides it; keep it out of files that other users
    can read."""
    early_token: bool = True
    """P draws the first token of a stream, too, and the router shows it at once; D draws it again and confirms it. Left
    out: grammars, several choices of a prompt (`n`), logprobs, pooling, answers that are not streamed, and a P and a D
    with devices of different kinds."""
    verify_kv: Literal["off", "sample", "all"] = "off"
    """Compare checksums of the received KV pages with those of P: of none, of some pages of each request, or of all.
    The logits row always has one."""
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)


class InstanceConfig(Section, frozen=True):
    """One instance, or a group of `dp_size` instances that live and die together: one torchrun, on each host."""

    host: str = "127.0.0.1"
    """Address at which the router and the peers reach the instance."""
    port: Port = 0
    """Port on which it receives requests. Of a group that of its first member, the next ones follow; 0: any free
    ones."""
    kv_events_port: Port = 0
    """Port at which others read what enters and leaves its prefix cache (`cache.events`); 0: none. Of a group that of
    its first member, the next ones follow."""
    kv_events_replay_port: Port = 0
    """Port at which they get missed messages again; 0: none. Of a group as above."""
    hosts: tuple[str, ...] = ()
    """Hosts of a group, in place of `host`: an equal number of its members is on each, the first ones on the first."""
    rendezvous_port: Port = 0
    """Port of the first of several `hosts` at which the processes of all of them find each other. It has to be given
    then."""
    devices: tuple[str, ...] = AUTO_DEVICES
    """`auto`: the next `dp_size` x `tp_size` GPUs that the node may use, in the order of the topology, or CPUs if it
    has none. Else one device per rank, `cpu` or `cuda:N`: the Nth of those GPUs; those of a member stand side by side.
    Several instances may name the same one."""
    tp_size: Parallel = 1
    """Number of ranks (tensor parallelism)."""
    dp_size: Parallel = 1
    """Members that share the experts; each has `tp_size` devices, and pages of its own."""
    experts: Literal["cut", "spread"] = "cut"
    """How the experts of a mixture are divided. `cut`: each of the `tp_size` ranks has a part of every expert.
    `spread`: each of the `dp_size` x `tp_size` ranks has whole experts of its own, and the members step together."""
    threads: Parallel | None = None
    """CPU threads of this instance, of each member in a group; overrides `scheduler.threads`."""
    num_pages: Positive | None = None
    """Pages of this instance, of each member in a group; overrides `cache.num_pages`."""
    memory_fraction: Fraction | None = None
    """Share of each GPU that it uses for its weights, steps and pages; unset: an equal part of
    `cache.memory_fraction`."""
    revision: str = ""
    """Label of its image, weights or configuration: a request stays within one revision that can serve it alone. Empty:
    a hash of the keys of `model` that change its numbers, and not its layout (`code`, `weights`, `prefill_attention`).
    """
    rack: str = ""
    """Name of its rack, or of any part of the network that is faster within: until the router has measured a link, it
    takes one within a rack to be faster than others, and one within a host to be faster still."""

    @property
    def num_devices(self) -> int:
        """Devices of all members."""
        return self.dp_size * self.tp_size

    @property
    def all_hosts(self) -> tuple[str, ...]:
        return self.hosts or (self.host,)

    @property
    def members_per_host(self) -> int:
        return max(1, self.dp_size // len(self.all_hosts))


PolicyName = Literal["round_robin", "least_loaded", "power_of_two", "prefix_affinity"]
DecodePolicyName = Literal["round_robin", "least_loaded", "power_of_two"]


class KeptRequestsConfig(Section, frozen=True):
    """Requests that survive the router: the next router with this folder continues those that run when it ends."""

    dir: str | None = None
    """Folder that both routers see, such as on a cluster's file system; unset: requests that run at the end fail. Its
    files have prompts and answers, and only this user can read them."""
    max_requests: Positive = 1024
    """Maximum requests in the folder, and continued by a router at once."""
    max_mb: Positive = 256
    """Maximum size of the files in the folder (MiB)."""
    max_age_s: Seconds = 86400.0
    """Age of a request, counted from the first router's end, at which it is removed, read or not."""


class BatchesConfig(Section, frozen=True):
    """Files and batches (`/v1/files`, `/v1/batches`) on the router's disk."""

    dir: str | None = None
    """Folder of the files and batches, in which only this user can read. A router that is started with it goes on with
    the batches that are in it, also on another machine if that sees the folder; several may share it. Unset: the routes
    answer 400."""
    max_file_mb: Positive = 256
    """Maximum size of an uploaded file (MiB)."""
    max_mb: Positive = 16384
    """Size of everything in the folder from which on no more is taken (MiB). Tenants have shares of it."""
    max_files: Positive = 10000
    """Maximum number of files and batches in the folder, with shares, too."""
    max_lines: Positive = 50000
    """Maximum number of lines of a batch."""
    max_in_flight: Positive = 64
    """Maximum lines of all batches that each router has sent and waits for; tenants share them."""
    max_age_s: Seconds = 2592000.0
    """Age at which a file, or a batch that is over, is removed, unless its request asks for less."""


class ImagesConfig(Section, frozen=True):
    """Limits on the images of requests, for models with vision."""

    max_images: Positive = 100
    """Maximum images of a request."""
    max_file_mb: Positive = 20
    """Maximum size of an image's file (MiB)."""
    max_total_mb: Positive = 64
    """Maximum size of the files of a request (MiB)."""
    max_pixels: Positive = 36_000_000
    """Maximum width times height of an image, by its header; larger ones are refused before they are decoded."""
    max_frames: Positive = 256
    """Maximum frames that are taken of a video, however long it is, and of a list of frames."""
    max_video_pixels: Positive = 25_165_824
    """Pixels that the frames of a video have together in the prompt; they are made smaller to fit. The default is what
    Qwen3-VL's own processor has: 12,288 tokens."""
    max_video_s: Seconds = 600.0
    """Maximum length of a video, by its header; longer ones are refused before they are decoded."""
    hosts: tuple[str, ...] = ()
    """Hosts that images may be fetched from (`http://`, `https://`): names, or `*.` and a name for all below it. Empty:
    only images in the request itself."""
    dir: str | None = None
    """Folder below which `file://` images may lie; unset: there are none."""
    fetch_timeout_s: Seconds = 10.0
    """Maximum time to fetch an image from a host, redirects included."""


class RouterConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    """Address at which P and D reach the router, and at which it listens."""
    hosts: tuple[str, ...] = ()
    """Addresses of several complete routers, each of which P and D join; the first replaces `host`. A host that is
    there k times has k routers: they share `port`, each has the API at `port` + 1 (+ 2, ...) alone, too, and to the
    other ports of the second one 2 is added, to those of the third 4, and so on. Empty: one router."""
    http_host: str | None = None
    """Address at which only the HTTP API listens: `0.0.0.0` for all of the machine's. Unset: `host`."""
    port: Port = 21003
    """HTTP: the API, probes, metrics, the web page."""
    metric_aliases: Literal["none", "vllm"] = "none"
    """`vllm`: `/metrics` has some numbers a second time, under the names that gateways and autoscalers expect of a vLLM
    server (docs/gateway.md)."""
    stats_port: Port = 29600
    """ZMQ: load, heartbeats and failures from P and D."""
    token_port: Port = 29700
    """ZMQ: tokens from D, and first ones from P."""
    policy: PolicyName = "prefix_affinity"
    """Routing policy of P and D. `prefix_affinity` picks the P that has computed a prompt's prefix before, if that is
    worth the load there, else the least loaded; D is then the least loaded."""
    prefill_policy: PolicyName | None = None
    """Routing policy of P and of unified instances; overrides `policy`."""
    decode_policy: DecodePolicyName | None = None
    """Routing policy of D; overrides `policy`."""
    max_in_flight: Positive = 4096
    """Maximum requests at once in a router; more get 429."""
    max_tokens_in_flight: Positive = 32 << 20
    """Maximum prompt tokens of these requests, so that long prompts cannot take all memory: a token takes four bytes
    here, and four in each message to P and D. More get 429; a single body with more gets 400."""
    max_body_bytes: Positive | None = None
    """Maximum body of one request; larger ones get 413. Unset: 2 MiB, in which a prompt of 262,144 tokens fits, and
    32 MiB for a model that sees images. Longer contexts or larger batches need more."""
    max_total_body_bytes: Positive = 256 << 20
    """Maximum total of all bodies that are being received or read in the whole router, beyond the first 64 KiB of each;
    more get 503."""
    request_timeout_s: Seconds = 600.0
    """Timeout of a whole request with all its attempts and tokens; then it ends with an error, also a stream."""
    keep_alive_s: Seconds = 120.0
    """Time that an idle connection stays open for the client's next request. It must be longer than proxies in front
    keep theirs (Go's and llm-d's: 90 s), or they send a request on a connection that is just closed."""
    stream_comment_s: NotNegative = 10.0
    """A stream that is silent for this long gets a comment (a line that readers of server-sent events skip), so that no
    proxy cuts it off; its head leaves with the first comment at the latest. 0: never."""
    unknown_fields: Literal["refuse", "warn"] = "warn"
    """Handling of unknown fields of bodies (docs/api.md lists the known ones). `warn`: they are ignored, and the
    answer's header X-Chitu-Warning names them. `refuse`: they are errors."""
    cors_origins: tuple[str, ...] = ()
    """Web pages whose scripts may use the API from a browser, as `https://host:port`; `*`: all. Empty: only the
    router's own. Operators' calls are excluded."""
    api_keys: tuple[str, ...] = ()
    """API keys, of which a request needs one (`Authorization: Bearer KEY`); empty: no key is needed."""
    api_key_salts: tuple[str, ...] = ()
    """One salt for each of `api_keys`, in their order: keys with the same salt share cached pages. Empty: no two keys
    do, so that no client can infer another one's prompts from the time to first token."""
    min_priority: Priority = 0
    """Lowest `priority` that a request may have; lower ones get 400. The lowest number goes first, and 0 is the
    default, so unless this is lower, no client goes ahead of the others. With the cluster's token there is no bound."""
    api_key_min_priorities: tuple[Priority, ...] = ()
    """One such bound for each of `api_keys`, in their order. Empty: `min_priority` for all."""
    otlp_endpoint: str = ""
    """Base URL of an OpenTelemetry collector (OTLP over HTTP), such as `http://127.0.0.1:4318`: it gets a trace of each
    request. Needs the extra `otel`, whose `OTEL_*` variables set the rest (sampling, headers, batches). Empty: none."""
    kept_requests: KeptRequestsConfig = field(default_factory=KeptRequestsConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    balance: Literal["off", "advise", "act"] = "off"
    """Balancer of P and D. `advise`: it says which instance should change its role, and how many instances of each role
    the load asks for, in the log, `GET /cluster` and `/metrics`. `act`: it also changes their roles. It aims at `slo`,
    which should be set."""
    balance_command: str = ""
    """Command that the router runs on its machine when the load asks for another number of instances, with the role,
    the number that is wanted and the number that is there as arguments. No shell reads it. Empty: none."""
    retry: RetryConfig = field(default_factory=RetryConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    slo: SLOConfig = field(default_factory=SLOConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    pd_disaggregation: PDDisaggregationConfig = field(default_factory=PDDisaggregationConfig)
    prefill_schedulers: tuple[InstanceConfig, ...] = ()
    decode_schedulers: tuple[InstanceConfig, ...] = ()
    unified_schedulers: tuple[InstanceConfig, ...] = ()
    encode_schedulers: tuple[InstanceConfig, ...] = ()


class DPConfig(Section, frozen=True):
    scheduler_base_port: Port | None = None
    """Request port of the scheduler process that reads this (one per torchrun); overrides its `port`."""
    probe_port: Port | None = None
    """HTTP port of each launcher (`chitu serve`, `node`, `join`) for `/livez` and `/readyz`: 200 if its processes are
    up, its instances have joined, and nothing drains or ends. On all addresses if the cluster has one that is not
    loopback. Unset: none."""
    router: RouterConfig = field(default_factory=RouterConfig)


class LogConfig(Section, frozen=True):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged. `DEBUG`: also a line about each step of an instance."""
    modules: tuple[str, ...] = ()
    """Log levels of single packages and modules below `chitu/`, such as `kv_transfer=DEBUG` or
    `router.attempts=ERROR`."""
    format: Literal["text", "json"] = "text"
    """`json`: one object a line, with `time`, `process`, `level`, `module`, `message`, `request_id` if the line is
    about one request, and `traceback`."""
    dir: str | None = None
    """Folder of the per-process logs of `chitu serve` and `chitu node`; unset: a new one in the temporary folder, which
    is removed at the end unless a process died. `-`: all processes and the launcher log to its stdout, in JSON
    (`format`), without a limit."""
    max_mb: Positive = 64
    """Maximum size of a process's log (MiB); beyond it, it is rotated to NAME.log.1, which replaces the last one."""


class TraceConfig(Section, frozen=True):
    """Trace records of requests, by router, P and D, for `chitu trace`. They have token ids of prompts and
    answers."""

    sample: Share = 0.0
    """Share of the requests that are traced without a header; 0.01: one in a hundred. A request with the header
    `X-Chitu-Trace: 0` is not."""
    by_header: bool = True
    """Whether any client of the API may have its request traced, by `X-Chitu-Trace: 1`."""
    dir: str | None = None
    """Folder on the router's machine, with a file of each process; unset: one in the temporary folder, which a launcher
    removes at its end."""
    max_mb: Positive = 64
    """Maximum size of a process's file (MiB); beyond it, it is rotated to NAME.jsonl.1, which replaces the last one."""
    profile_dir: str | None = None
    """Folder, on the machine of each instance, for the files of `POST /admin/profile`; unset: that call is refused."""
    profile_mb: Positive = 256
    """Maximum size of one of these files (MiB), compressed; a larger one is not kept."""


class Topology(Section, frozen=True):
    """A whole cluster: the YAML file, with defaults filled in."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dp_config: DPConfig = field(default_factory=DPConfig)
    log: LogConfig = field(default_factory=LogConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
