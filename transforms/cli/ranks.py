"""Runs a command in its processes (this one, ranks that it starts, or torchrun's), and opens the
model in each."""

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

import attrs
import torch

from weft.arguments.checks import kind_of
from weft.display.quantities import counted
from weft.errors import (
    CheckpointNotFoundError,
    CompilerError,
    ConfigError,
    ConfigWarning,
    ProgramError,
    WeftError,
)
from weft.stages.checkpoints.formats import load_config, open_checkpoint
from weft.stages.checkpoints.loading import load
from weft.stages.choices import pick_attention, pick_device, pick_experts, pick_leaves
from weft.stages.config import ModelConfig, parse_config
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS, random_model
from weft.stages.shares import share_config
from weft.transforms.cli.fields import Options
from weft.transforms.cli.options import Bench, ModelOptions, RunOptions, Serve
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.graphs.options import check_compiler
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@attrs.frozen(eq=False)
class Here:
    """What this process runs: its stage, its share of each layer, its device.

    Args:
        transport: connects it to the other stages.
        num_stages: the stages of the whole pipeline.
        device: the device of its tensors; None: `load` chooses.
        stage: the stage to load, and the number of stages; None: the whole model.
        shard: the share of each layer to load, and the number of ranks that share a layer.
    """

    transport: Transport
    num_stages: int
    device: torch.device | str | None
    stage: tuple[int, int] | None = None
    shard: tuple[int, int] = (0, 1)

    @property
    def first(self) -> bool:
        """Whether this process prints."""
        return self.has_first_stage and self.shard[0] == 0

    @property
    def has_first_stage(self) -> bool:
        """Whether this process runs the first stage, or a share of it."""
        return self.stage is None or self.stage[0] == 0

    @property
    def num_ranks(self) -> int:
        """The number of processes of the run."""
        if self.stage is None:
            return 1
        return self.num_stages * self.shard[1]

    @property
    def progress(self) -> bool:
        """Whether to show progress bars, which appear only in a terminal."""
        return self.first and sys.stderr.isatty()


def in_ranks(fn: Callable[[Here, *Ts], T], options: RunOptions, *args: *Ts) -> T:
    """Call `fn(here, *args)` in every process of the pipeline, and return the first one's result.

    Under torchrun, all ranks but the first exit here, since only the first one prints.

    Args:
        fn: a module-level function, since it is pickled by name.

    Raises:
        RequestError: `--pp` times `--tp` is not torchrun's number of processes; the transport needs
            several ranks, or does not serve the device; or there are fewer GPUs than ranks.
        SystemExit: with 0, on a rank of torchrun that is not the first.
        Whatever `fn` raises.
    """
    world = world_size(options)
    transport = options.transport
    shares = options.tp
    stages = num_stages(options)
    flag = f"--transport {transport}"
    within = transport in ("local", "threads")
    ranks = stages * shares
    written = f"--pp {stages}" + f" --tp {shares}" * (shares > 1)
    if world > 1 and ranks != world:
        problem = f"{written} under torchrun with {world} processes"
        options.refuse(
            written,
            problem,
            f"--pp {world // shares}, or leave it out" if world % shares == 0 else "--tp 1",
        )
    if world > 1 and within:
        problem = f"{world} processes of torchrun, and a transport within one process"
        options.refuse(flag, problem, "no torchrun, or no --transport")
    if shares > 1 and within:
        problem = f"{shares} ranks that share each layer, and a transport within one process"
        options.refuse(flag, problem, "no --transport, or --tp 1")
    if ranks == 1 and transport is not None and not within:
        problem = f"one stage, which sends nothing by {transport}"
        options.refuse(flag, problem, "--pp 2 or more, or no --transport")
    if ranks == 1 or within:
        here = Here(
            Threads(timeout=options.timeout) if transport == "threads" else Local(),
            stages,
            options.device,
        )
        return fn(here, *args)
    # torchrun's ranks may be on several machines, so that this one need not have a GPU for each.
    _check_device(options, ranks if world == 1 else 1)
    if world > 1:
        result = _as_rank(fn, options, *args)
        if os.environ["RANK"] != "0":
            sys.exit()
        return result
    return cast(T, launch(_as_rank, ranks, fn, options, *args, timeout=options.timeout)[0])


def num_stages(options: ModelOptions) -> int:
    """The number of pipeline stages: `--pp`, else torchrun's processes over `--tp`, else 1."""
    return options.num_stages or max(world_size(options) // options.tp, 1)


def world_size(options: Options) -> int:
    """The number of torchrun's processes; 1 without torchrun."""
    if "RANK" in os.environ:
        size = os.environ.get("WORLD_SIZE", "1")
    else:
        size = "1"
    if not size.isdecimal():
        options.refuse("", f"RANK is set, and WORLD_SIZE={size!r}", "unset both")
    return int(size)


def _as_rank(fn: Callable[[Here, *Ts], T], options: RunOptions, *args: *Ts) -> T:
    """Call `fn` as one rank."""
    backend: Any = options.transport
    # Plain `cuda` lets the transport give each rank its own GPU.
    if options.device == "cuda":
        device = None
    else:
        device = options.device
    # The parent has read the configuration and warned already.
    warnings.simplefilter("ignore", ConfigWarning)
    transport = Distributed(device=device, backend=backend, timeout=options.timeout)
    try:
        stages = transport.num_ranks // options.tp
        # As in `Split.mesh`: the ranks that share a stage have consecutive numbers.
        stage = (transport.rank // options.tp, stages)
        shard = (transport.rank % options.tp, options.tp)
        return fn(Here(transport, stages, transport.device, stage, shard), *args)
    finally:
        transport.close()


def _check_device(options: RunOptions, num_ranks: int) -> None:
    """Refuse a device that the transport does not serve, or that several ranks here would have to
    share."""
    device = pick_device(options.device, call=f"--device {options.device}")
    transport = options.transport
    on_gpus = device.type == "cuda"
    count = torch.cuda.device_count()
    suiting = ("nccl", "peer") if on_gpus else ("gloo",)
    if transport not in (None, *suiting):
        problem = (
            f"stages on {'GPUs' if on_gpus else 'the CPU'}, which {transport} does not connect"
        )
        options.refuse(
            f"--transport {transport}",
            problem,
            f"--transport {' or '.join(suiting)}, or another --device",
        )
    if on_gpus and count < num_ranks:
        flag, what = ("--pp", "stages") if options.tp == 1 else (f"--tp {options.tp} --pp", "ranks")
        instead = (
            "--transport local (all stages on one GPU), --device cpu, or a smaller"
            f" {flag.split()[0]}"
        )
        written = f"{flag} {num_ranks // options.tp}"
        options.refuse(written, f"{counted(count, 'GPU')} for {num_ranks} {what}", instead)
    if on_gpus and device.index is not None:
        problem = "one GPU for several processes, each of which needs its own"
        instead = "--device cuda, or --transport local: all stages in one process, on that GPU"
        options.refuse(f"--device {options.device}", problem, instead)


def _read_config(model: str, call: str) -> ModelConfig:
    return open_checkpoint(model, call).read_config(call, strict=False)


def _model_call(options: ModelOptions) -> str:
    """The part of the command that names the model, as the user wrote it."""
    if isinstance(options, Serve):
        return f"weft serve {options.model}"
    return f"--model {options.model}"


def read_config(options: ModelOptions) -> ModelConfig:
    """Read and check the configuration of the checkpoint or preset, before anything is loaded.

    The draft model's configuration is checked, too.

    Raises:
        CheckpointNotFoundError, ConfigError: there is no configuration, or weft does not support
            one of its fields.
        RequestError: the layers cannot be split into so many stages or shares.
    """
    if options.draft is not None:
        _read_config(options.draft, f"--draft {options.draft}")
    if options.model is None:
        config = parse_config(PRESETS[str(options.preset)], source=f"preset {options.preset!r}")
    else:
        config = _read_config(options.model, _model_call(options))
    count = num_stages(options)
    if options.num_stages is None:
        written = f"under torchrun with {count} processes"
    else:
        written = f"--pp {count}"
    with options.about(written, ProgramError):
        split_layers(config.num_layers, count)
    flag, ranks = options.sharing
    written = f"{flag} {ranks}" + f" --experts {options.experts}" * (options.experts is not None)
    with options.about(written, ConfigError):
        config = pick_experts(options.experts, config, ranks, call="")
        share_config(config, options.tp)
    if isinstance(options, RunOptions):
        with options.about(f"--compiler {options.compiler}", CompilerError):
            check_compiler("", options.compiler)
        with options.about(f"--reduction-leaves {options.reduction_leaves}", WeftError):
            pick_leaves(
                options.reduction_leaves, config, options.batch_invariant, options.tp, call=""
            )
    return config


def open_model(options: RunOptions, here: Here) -> Model:
    """The part of the model that runs in this process, with the custom stages of `--stages`."""
    if options.dummy and isinstance(options, Bench | Serve):
        config = read_config(options)
        name = options.model or str(options.preset)
        kind: dict[str, Any] = {
            "dtype": options.dtype,
            "stage": here.stage,
            "name": name,
            "kv_dtype": options.kv_dtype,
        }
        kind["shard"] = here.shard
        model = random_model(config, seed=options.seed or 0, device=here.device, **kind)
        # The weights are random, but the checkpoint's tokenizer is real: clients may send texts.
        if options.model is not None:
            call = _model_call(options)
            checkpoint = open_checkpoint(options.model, call)
            template = checkpoint.read_chat_template(call)
            model = attrs.evolve(
                model, tokenizer=checkpoint.read_tokenizer(call, False), chat_template=template
            )
        return _with_stages(options, model)
    kind = {
        "stage": here.stage,
        "shard": here.shard,
        "experts": options.experts,
        "kv_dtype": options.kv_dtype,
    }
    try:
        model = load(str(options.model), here.device, options.dtype, progress=here.progress, **kind)
    except CheckpointNotFoundError as error:
        if (
            not isinstance(options, Bench | Serve)
            or not Path(str(options.model), "config.json").is_file()
        ):
            raise
        instead = f"{error.instead}; or random weights: --load-format dummy"
        raise CheckpointNotFoundError(error.call, error.problem, instead) from None
    return _with_stages(options, model)


def _with_stages(options: RunOptions, model: Model) -> Model:
    """Apply `--attention`, `--batch-invariant` with `--reduction-leaves`, and the function of
    `--stages`, in this order."""
    if options.attention != "auto":
        with options.about(f"--attention {options.attention}", WeftError):
            backend_args = (
                model.config,
                model.device,
                model.dtype,
                model.kv_dtype,
                options.batch_invariant,
            )
            chosen = pick_attention(options.attention, *backend_args, call="")
            if chosen is not None:
                model = model.with_stages(attend=chosen)
    if options.batch_invariant:
        model = model.with_stages(batch_invariant=True, reduction_leaves=options.reduction_leaves)
    # The custom function comes last, so that it sees what the other flags chose and may replace it.
    if options.stages is None:
        return model
    flag, (module, _, name) = f"--stages {options.stages}", options.stages.partition(":")
    # Installed commands do not have the current folder on their path, as `python -m` does.
    sys.path.insert(0, os.getcwd())
    try:
        changed: Any = getattr(importlib.import_module(module), name)(model)
    except Exception as error:
        problem = traceback.format_exception_only(error)[-1].strip()
        options.refuse(
            flag,
            problem,
            "a function of a module in this folder, or of an installed one, that takes the model",
        )
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(changed, Model):
        options.refuse(flag, f"it returned {kind_of(changed)}", "return model.with_stages(...)")
    return changed


def open_drafts(options: RunOptions, here: Here) -> Speculation | None:
    """The speculation that the options describe; only the first stage loads the draft model."""
    count = options.speculate
    folder = options.draft
    if count is None or folder is None:
        if count is None:
            return None
        return Speculation(count)
    return Speculation(
        count,
        model=(
            load(folder, here.device, options.dtype)
            if here.has_first_stage
            else load_config(folder)
        ),
    )


def make_engine(
    options: Bench,
    here: Here,
    model: Model,
    graph: str,
    max_model_len: int,
    num_cohorts: int | None = None,
) -> Engine:
    """An engine with these options, in one of the graph modes."""
    limits = EngineLimits(
        max_num_reqs=options.max_num_seqs,
        max_num_tokens=options.tokens_per_step,
        max_model_len=max_model_len,
        num_pages=options.num_pages,
        num_cohorts=num_cohorts,
        max_step_seconds=options.max_step_seconds,
    )
    return Engine(
        model,
        limits,
        pipeline=here.num_stages,
        graph=graph,
        compiler=None if graph == "none" else options.compiler,
        transport=here.transport,
        run_ahead=options.run_ahead,
        seed=options.seed,
        speculation=open_drafts(options, here),
    )
