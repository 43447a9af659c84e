"""The options of each command.

Importing this module imports neither torch, rich nor numpy, so that `--help` is fast.
"""

import math
from collections.abc import Sequence
from functools import partial

import attrs

from weft.batches.sampling import SamplingParams
from weft.transforms.cli.fields import GROUPS, Options, option, sampling_option
from weft.transforms.cli.flags import (
    ADAPTER,
    ATTENTION,
    BANDWIDTH,
    CERTIFICATES,
    COUNT,
    DEVICE,
    DIR,
    DIRS,
    DTYPES,
    EXPERTS,
    FILE,
    GIGABYTES,
    IDS,
    KV_DTYPES,
    LATENCY,
    LINK,
    NAME,
    NAMED,
    POLICIES,
    SECONDS,
    SEED,
    SPLITS,
    SWITCH,
    TEMPERATURE,
    TEXT,
    TEXT_ONCE,
    TRANSPORTS,
    WORD,
    value,
    whole,
)
from weft.transforms.graphs.ladder import MODES

# The values of `--preset`. They repeat the names in `weft.stages.random_weights`, which imports
# torch.
PRESETS = (
    "tiny",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b-fp8",
    "qwen3-30b-a3b-fp8",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "llama-3.2-1b",
    "llama-3.1-8b",
)

_TOKENS_PER_STEP = "8192 on a large GPU, 4096 there for a small model, else 2048"
# The values of `--workload`: tokens of each prompt and of each completion.
WORKLOADS = {"decode": (2, 512), "prefill": (512, 64), "mixed": (512, 512)}
_SIZES = ", ".join(
    f"{name} {prompt} and {completion}" for name, (prompt, completion) in WORKLOADS.items()
)

_model, _general, _prompts, _sampling, _measured, _load, _machine, _how, _network = (
    partial(option, group) for group in GROUPS
)

_NUM_PAGES = "pages of the KV cache (default: what fits in memory, or what all requests can use)"
_STEP_SECONDS = (
    "the most seconds of a step with prompts, which then has as few tokens as need be, so that"
    " decodes wait less; measured at the start (default: no limit)"
)
_STAGES = "pipeline stages, one process each (default 1; under torchrun, all)"
_EXPERTS = (
    "how --tp splits a layer's experts: columns gives each process a slice of every expert, whole"
    " gives it some entire experts (default: columns if they divide evenly, else whole)"
)
_SHARES = (
    "tensor parallelism: processes that split each layer (default 1); the run has --pp times --tp"
    " processes"
)
_LEAVES = (
    "parts that each sum is cut into, a power of two: the bits are then the same for any --tp that"
    " divides it; generate and verify need the same N (default 1)"
)
_FOLDER = (
    "a checkpoint: a folder in Hugging Face's format, a .gguf, or, if there is no such path, demo"
    " or smollm2"
)
_DEVICE = "cpu, cuda or cuda:N (default: cuda if there is a GPU)"
_GRAPH = (
    "graph mode (default full_and_piecewise; none on a CPU without --compiler, which starts sooner"
)
_COMPILER = (
    "what compiles the graphs: inductor, or another back end of torch.compile (default: nothing)"
)


@attrs.frozen(kw_only=True)
class ModelOptions(Options):
    """The options of a command that reads a model's configuration."""

    model: str | None = _model(_FOLDER, DIR)
    preset: str | None = _model("the dimensions of a known model", PRESETS)
    pp: int | tuple[int, ...] | None = _how(_STAGES, whole("N"))
    tp: int = _how(_SHARES, whole("N"), 1)
    experts: str | None = _how(_EXPERTS, EXPERTS)
    json: bool = _general("print one JSON object", SWITCH, False)
    # No flag of its own, but `read_config` checks the draft model of each command that has one.
    draft: str | None = None

    @property
    def dummy(self) -> bool:
        """Whether the weights are random, drawn on the device."""
        return self.preset is not None

    @property
    def splits(self) -> tuple[int | None, ...]:
        """Each number of stages to run with; None: 1, or what torchrun's processes make up."""
        if isinstance(self.pp, tuple):
            return self.pp
        return (self.pp,)

    @property
    def num_stages(self) -> int | None:
        """The number of stages."""
        return self.splits[0]

    @property
    def sharing(self) -> tuple[str, int]:
        """The flag that sets how many ranks may share a layer, and that number."""
        return "--tp", self.tp


@attrs.frozen(kw_only=True)
class RunOptions(ModelOptions):
    """The options of a command that runs a model: speculation, transport, dtypes, graph mode."""

    speculate: int | None = _how(
        "draft and verify K tokens per step, by prompt lookup or --draft; the tokens stay the same",
        whole("K", 1, 1024),
    )
    draft: str | None = _how(
        "a checkpoint with the same vocabulary that drafts; needs --speculate", DIR
    )
    transport: str | None = _how(
        "between stages (default: nccl on GPUs, else gloo; local: one process)", TRANSPORTS
    )
    stages: str | None = _how(
        "stages of your own: a function that is given the model and returns it with them", NAMED
    )
    timeout: float = _how(
        "seconds that a stage may keep another waiting before both stop, once loaded", SECONDS, 30.0
    )
    device: str | None = _how(_DEVICE, DEVICE)
    dtype: str | None = _how(
        "dtype of the weights and the KV cache (default: the checkpoint's)", DTYPES
    )
    kv_dtype: str | None = _how(
        "dtype of the KV cache, if another: half the memory, rounded", KV_DTYPES
    )
    attention: str = _how(
        "implementation of attention; auto: the fastest that was measured", ATTENTION, "auto"
    )
    batch_invariant: bool = _how(
        "a request's tokens and logprobs are the same bits in any batch", SWITCH, False
    )
    reduction_leaves: int = _how(_LEAVES, whole("N"), 1)
    graph: str | None = _how(f"{_GRAPH})", MODES)
    compiler: str | None = _how(_COMPILER, NAME)

    def check(self) -> None:
        """Check as `Options.check` does, and also refuse a compiler of no graphs."""
        super().check()
        if self.compiler is not None and self.graph == "none":
            self.refuse(
                f"--compiler {self.compiler}",
                "no graphs to compile with --graph none",
                "--graph full, or leave out one of the two",
            )

    @property
    def graph_mode(self) -> str:
        """The mode of `--graph`, or else the device's default.

        Raises:
            DeviceError: this machine does not have the device.
        """
        from weft.stages.choices import pick_device  # which imports torch

        on_cpu = pick_device(self.device, call=f"--device {self.device}").type == "cpu"
        is_slow = on_cpu and self.compiler is None
        return self.graph or ("none" if is_slow else "full_and_piecewise")


@attrs.frozen(kw_only=True)
class WeightOptions(RunOptions):
    """The options of a command that can also run random weights."""

    load_format: str | None = _general(
        "dummy: random weights (default: auto; with --preset dummy)", ("auto", "dummy")
    )

    @property
    def dummy(self) -> bool:
        """Whether the weights are random, drawn on the device."""
        return self.preset is not None or self.load_format == "dummy"

    def check(self) -> None:
        """Check as `Options.check` does, and also refuse to load weights for a preset."""
        super().check()
        if self.preset is not None and self.load_format == "auto":
            self.refuse(
                "--load-format auto",
                "a preset has no weights",
                "--load-format dummy, or a checkpoint",
            )


@attrs.frozen(kw_only=True)
class Demo(Options):
    """Generate from three prompts with the checkpoint that weft ships: eagerly, graphified,
    pipelined over 2 stages, both, and each prompt alone; fast, and batch invariant. Compare tokens,
    logits and state after every step, and exit with 1 if they differ by more than rounding, or in
    any bit of the batch-invariant model."""

    command = "demo"
    summary = "see that graphs and pipelines change no result"

    device: str | None = _general(_DEVICE, DEVICE)
    max_tokens: int = _general("tokens to generate per prompt", whole("N"), 64)


@attrs.frozen(kw_only=True)
class Doctor(Options):
    """Show what weft would run on here, and why: versions, devices, graph back ends, kernels."""

    command = "doctor"
    summary = "show versions, devices and back ends"

    json: bool = _general("print one JSON object", SWITCH, False)


@attrs.frozen(kw_only=True)
class Generate(RunOptions):
    """Complete prompts, all in one batch, and print the completions in the order of the prompts."""

    command = "generate"
    usage = "--model DIR --prompt TEXT [options]"
    summary = "complete prompts with a checkpoint"

    model: str = _general(_FOLDER, DIR, attrs.NOTHING)
    preset: None = None
    prompt: Sequence[str | list[int]] = _prompts(
        "a text; may be repeated", TEXT, (), also={"--prompt-ids": IDS}
    )
    chat: bool = _prompts(
        "each text is a user's message, by the checkpoint's chat template", SWITCH, False
    )
    system: str | None = _prompts("the system's message before it; needs --chat", TEXT_ONCE)
    max_tokens: int = _sampling(
        "tokens to generate per prompt (default 64, or as many as the model has room for)",
        whole("N"),
        64,
    )
    temperature: float = _sampling("0, the default, is greedy", TEMPERATURE, 0.0)
    seed: int | None = _sampling("seed of all random choices (default: a fresh one)", SEED)
    top_k: int = sampling_option("top_k", "K")
    top_p: float = sampling_option("top_p", "P")
    min_p: float = sampling_option("min_p", "P")
    repetition_penalty: float = sampling_option("repetition_penalty", "X")
    presence_penalty: float = sampling_option("presence_penalty", "X")
    frequency_penalty: float = sampling_option("frequency_penalty", "X")
    stop: Sequence[str] = sampling_option("stop", "TEXT")
    min_tokens: int = sampling_option("min_tokens", "N")
    ignore_eos: bool = sampling_option("ignore_eos", "")
    adapter: str | None = _sampling("a LoRA adapter, as PEFT saves it", DIR)
    json: bool = _general("print one JSON object per completion, one per line", SWITCH, False)
    certificates: str | None = _general(
        "write each completion's certificate, for weft verify; needs --batch-invariant", FILE
    )

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are chosen, without the seed, which `generate` takes for all prompts.

        Raises:
            RequestError: a flag that changes nothing without --temperature.
        """
        # Only flags that the user wrote: `SamplingParams` refuses what has no effect at temperature
        # 0, and the defaults are no mistake.
        names = (self.explicit & attrs.fields_dict(SamplingParams).keys()) - {"seed"}
        return SamplingParams(**{name: getattr(self, name) for name in names})


@attrs.frozen(kw_only=True)
class Verify(RunOptions):
    """Compute certified completions again, all in one batch, in any split and mode, and compare
    them bit for bit. Print `equal`, `equal, with other weights`, or the first token that differs,
    and exit with 1 unless all are equal."""

    command = "verify"
    usage = "CERTIFICATES --model DIR [options]"
    summary = "compute certified completions again, and compare every bit"

    certificate: str = _general(
        "what weft generate --certificates wrote", CERTIFICATES, attrs.NOTHING
    )
    model: str = _general(_FOLDER, DIR, attrs.NOTHING)
    preset: None = None
    json: bool = _general("print one JSON object per certificate, one per line", SWITCH, False)
    adapter: Sequence[str] = _general(
        "a LoRA adapter that a certificate names; may be repeated", DIRS, ()
    )
    max_num_seqs: int = _how("completions that run at once", COUNT, 64)
    max_num_tokens: int | None = _how(
        "tokens per step, so that prompts are read in chunks", whole("N", 1, 2**17)
    )
    # No flags: bits that depend on the batch, or on a compiler, cannot be verified.
    batch_invariant: bool = True
    compiler: None = None


@attrs.frozen(kw_only=True)
class Serve(WeightOptions):
    """Serve a checkpoint over HTTP, by OpenAI's API: /v1/completions, /v1/chat/completions,
    /v1/models, /tokenize, /health, /metrics. It listens on this machine alone unless --host says
    otherwise. On SIGTERM or Ctrl-C it finishes the running requests and then exits."""

    command = "serve"
    usage = "(MODEL | --preset NAME) [options]"
    summary = "serve a checkpoint over HTTP, by OpenAI's API"

    model: str | None = _model(_FOLDER, WORD)
    preset: str | None = _model(
        "the dimensions of a known model; random weights, prompts are token ids", PRESETS
    )
    # Without the flag of `ModelOptions`: a server has no result to print.
    json: bool = False
    # vLLM listens on all interfaces by default. Without an API key, this machine alone is safer.
    host: str = _network(
        "address to listen on", value("ADDRESS", str, bool, "an address"), "127.0.0.1"
    )
    port: int = _network("0: one that is free, which is printed", whole("N", 0, 65535), 8000)
    api_key: str | None = _network(
        "what clients must send (default: $WEFT_API_KEY; without one, nothing)", TEXT_ONCE
    )
    served_model_name: str | None = _network(
        "the model's name to clients (default: that of its folder)", TEXT_ONCE
    )
    adapter: Sequence[tuple[str, str]] = _network(
        "a LoRA adapter, a model of its own to clients", ADAPTER, ()
    )
    chat_template: str | None = _network(
        "a template of your own, in Jinja (default: the checkpoint's)", FILE
    )
    max_waiting: int = _network(
        "requests that may wait; others get status 429", whole("N", 0, 2**20), 1024
    )
    max_body: int = _network("bytes of a request", whole("N", 1, 2**30), 4 * 2**20)
    max_n: int = _network("completions of one prompt", whole("N", 1, 10_000), 128)
    request_timeout: float | None = _network(
        "seconds that a request may take (default: no limit)", SECONDS
    )
    max_logprobs: int = _network(
        "the most logprobs of a token; more cost time at each step", whole("N", 0, 2**17), 5
    )
    scheduling_policy: str = _how(
        "fcfs: as they come; priority: by the requests' `priority`", POLICIES, "fcfs"
    )
    no_prefix_caching: bool = _how(
        "compute every prompt whole, also where another one began alike", SWITCH, False
    )
    max_num_seqs: int = _how("completions that run at once", COUNT, 128)
    max_num_tokens: int | None = _how(
        f"tokens per step (default {_TOKENS_PER_STEP})", whole("N", 1, 2**17)
    )
    max_step_seconds: float | None = _how(_STEP_SECONDS, SECONDS)
    max_model_len: int | None = _how(
        "tokens of a request (default: the model's limit, at most 4096)", COUNT
    )
    num_pages: int | None = _how(_NUM_PAGES, COUNT)
    run_ahead: int = _how(
        "steps that are launched before the first of them is read", whole("K", 0, 2**20), 1
    )
    seed: int | None = _how("seed of requests without one (default: a fresh one)", SEED)


@attrs.frozen(kw_only=True)
class Bench(WeightOptions):
    """Serve many requests that all arrive at once, and measure when the host reads each token. With
    --eval, score a file of tasks in each graph mode and split instead, and exit with 1 if the
    scores differ."""

    command = "bench"
    usage = "(--model DIR | --preset NAME) [options]"
    summary = "measure serving, or score a file of tasks"

    out: str | None = _general("write the JSON object to a file, too", FILE)
    workload: str = _measured(f"tokens in and out: {_SIZES}", tuple(WORKLOADS), "decode")
    input_len: int | None = _measured("tokens of each prompt; needs --output-len", COUNT)
    output_len: int | None = _measured("tokens of each completion; needs --input-len", COUNT)
    num_prompts: int = _measured("requests", COUNT, 128)
    temperature: float = _measured("0 is greedy", TEMPERATURE, 1.0)
    # A fixed seed, unlike that of `serve`: two measurements must do the same work.
    seed: int = _measured("seed of random weights, prompts and samples", SEED, 0)
    eval: str | None = _measured(
        'score each line of a file instead: {"text": ...} by its perplexity, {"prompt": ...,'
        ' "answer": ...} by whether the greedy completion is the answer',
        FILE,
    )
    max_num_seqs: int = _how("requests that run at once", COUNT, 128)
    max_num_tokens: int | None = _how(
        f"tokens per step (default {_TOKENS_PER_STEP}; with --eval as --max-num-seqs)",
        whole("N", 1, 2**17),
    )
    max_step_seconds: float | None = _how(_STEP_SECONDS, SECONDS)
    num_pages: int | None = _how(_NUM_PAGES, COUNT)
    pp: int | tuple[int, ...] | None = _how(f"{_STAGES}; with --eval several too: 1,2,3", SPLITS)
    graph: str | None = _how(f"{_GRAPH}; with --eval all, one by one)", (*MODES, "all"))
    run_ahead: int = _how(
        "steps that are launched before the first of them is read", whole("K", 0, 2**20), 1
    )

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of tokens of each prompt, and of each completion."""
        if self.input_len is None or self.output_len is None:
            return WORKLOADS[self.workload]
        return self.input_len, self.output_len

    @property
    def tokens_per_step(self) -> int | None:
        """The most tokens of a step; None: the engine's default."""
        return self.max_num_tokens or (None if self.eval is None else self.max_num_seqs)

    @property
    def graphs(self) -> tuple[str, ...]:
        """The graph modes: the one to time, or those to score."""
        if self.graph is None or self.graph == "all":
            if self.eval is None:
                return (self.graph_mode,)
            return MODES
        return (self.graph,)


@attrs.frozen(kw_only=True)
class Plan(ModelOptions):
    """Predict the speed of decoding over several GPUs from config.json alone, without weights:
    tokens/s and what bounds them, whether it fits into memory, the best split of the layers, the
    best number of groups of requests that take turns, and a timeline. A stage's time is the bytes
    that it reads divided by the memory bandwidth. Exit with 1 if the model does not fit into
    memory."""

    command = "plan"
    usage = "(--model DIR | --preset NAME) [[--pp N] [--tp N] | --gpus N] [options]"
    summary = "predict a pipeline from a config.json"

    pp: int | None = _general("pipeline stages (default 1)", whole("N"))
    tp: int = _general("tensor parallelism: GPUs that split each layer (default 1)", whole("N"), 1)
    gpus: int | None = _general(
        "GPUs: try each --tp times --pp that uses all, and show the best", whole("N")
    )
    svg: str | None = _general("write a picture of the timeline, too", FILE)
    programs: bool = _general("print the timeline's programs, too", SWITCH, False)
    requests: int = _load("requests that decode together", whole("R"), 128)
    context: int | None = _load(
        "tokens before the new one (default 1024, or half of the positions)", whole("T", 0)
    )
    cohorts: int | None = _load(
        "groups of requests that take turns (default: the fastest number)", whole("C", 1, 1000)
    )
    steps: int = _load("steps of each cohort in the timeline", whole("K"), 2)
    bandwidth: float = _machine(
        "memory bandwidth of a device (default 4800, an H200's data sheet)", BANDWIDTH, 4800.0
    )
    memory: float = _machine(
        "memory of a device (default 141, an H200's data sheet)", GIGABYTES, 141.0
    )
    link: float = _machine("bandwidth between two ranks (default: no limit)", LINK, math.inf)
    latency: float = _machine("microseconds of a transfer, whatever its size", LATENCY, 0)
    capacity: int = _machine("messages that an edge holds", whole("M"), 2)
    kernel: float = _machine(
        "microseconds that each of a layer's 11 kernels adds to the time of reading (default 0)",
        LATENCY,
        0,
    )
    gpus_per_node: int | None = _machine("GPUs of a node (default: all are in one)", whole("N"))
    node_link: float | None = _machine(
        "bandwidth between ranks of two nodes (default: as --link)", LINK
    )
    node_latency: float | None = _machine(
        "microseconds of a transfer between two nodes (default: as --latency)", LATENCY
    )

    @property
    def sharing(self) -> tuple[str, int]:
        """The flag that sets how many ranks may share a layer, and that number."""
        if self.gpus is None:
            return ("--tp", self.tp)
        return ("--gpus", self.gpus)

    def check(self) -> None:
        """Check as `Options.check` does, and also refuse a link between nodes if there is only one
        node."""
        super().check()
        for name, figure in (
            ("--node-link", self.node_link),
            ("--node-latency", self.node_latency),
        ):
            if figure is not None and self.gpus_per_node is None:
                self.refuse(
                    f"{name} {figure:g}", "one node", f"--gpus-per-node 8 with {name}, or neither"
                )
