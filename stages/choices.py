"""The device, the dtype, the stage and the attention of a model, from a caller's arguments."""

from typing import Any

import attrs
import torch

from weft.arguments.checks import Rule, check_values, is_int
from weft.errors import ConfigError, DeviceError, ProgramError, RequestError
from weft.ops.attention.backends import BACKENDS, OWN, AttentionBackend, check_support
from weft.ops.register import FLOATS
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import LEAVES
from weft.stages.shares import check_leaves

# The dtypes of a KV cache besides the model's own.
KV_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn}
# The dtypes that a decoder runs in.
DTYPES = {f"{dtype}".removeprefix("torch."): dtype for dtype in FLOATS}
# The ways in which ranks share the experts of a layer.
EXPERTS = "columns", "whole"

_RULES: dict[str, Rule] = {
    "dtype": (lambda dtype: dtype is None or _is_dtype(dtype), f"one of {', '.join(DTYPES)}"),
    "kv_dtype": (
        lambda dtype: dtype is None or dtype in (*KV_DTYPES, *KV_DTYPES.values()),
        f"{', '.join(KV_DTYPES)}, or None: the model's own dtype",
    ),
    "attention": (
        lambda one: isinstance(one, AttentionBackend) or one in ("auto", *BACKENDS),
        f"an AttentionBackend, or one of auto, {', '.join(BACKENDS)}",
    ),
    "batch_invariant": (lambda flag: isinstance(flag, bool), "True or False"),
    "experts": (
        lambda how: how in (None, *EXPERTS),
        f"one of {', '.join(EXPERTS)}, or None: as they can be cut",
    ),
    "reduction_leaves": LEAVES,
    "shard": (
        lambda shard: shard is None or _is_stage(shard),
        "(index, num_ranks), the ranks numbered from 0",
    ),
    "stage": (
        lambda stage: stage is None or _is_stage(stage),
        "(index, num_stages), the stages numbered from 0",
    ),
}


def _is_dtype(value: Any) -> bool:
    if isinstance(value, str):
        return value in DTYPES
    return value in DTYPES.values()


def _is_stage(value: Any) -> bool:
    index, num_stages = (
        value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    )
    return is_int(num_stages) and is_int(index, 0, num_stages - 1)


def pick_device(device: torch.device | str | None, *, call: str) -> torch.device:
    """`device`; for None, CUDA if there is a GPU, otherwise the CPU.

    Raises:
        DeviceError: a device that this machine does not have.
    """
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    else:
        count = 0
    if device is None:
        return torch.device("cuda" if count else "cpu")
    problem = f"device {str(device)!r}"
    instead = "'cpu', 'cuda' or 'cuda:N'"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        problem += ", which torch does not know"
    else:
        if chosen.type == "cpu" or (chosen.type == "cuda" and (chosen.index or 0) < count):
            return chosen
        problem += ", for which weft has no kernels"
        if chosen.type == "cuda":
            problem = f"device {str(device)!r}, but torch sees {count} CUDA devices"
            instead = "'cpu', or leave it out"
    # `weft.load(path, torch.float16)`: a dtype in the place of the device.
    if isinstance(device, torch.dtype):
        instead = "dtype=..."
    raise DeviceError(call, problem, instead)


def pick_dtype(dtype: torch.dtype | str | None, *, call: str) -> torch.dtype | None:
    """The torch dtype of a name or a dtype; None stays None.

    Raises:
        RequestError: a dtype that no decoder runs in.
    """
    check_values(call, _RULES, {"dtype": dtype})
    if isinstance(dtype, str):
        return DTYPES[dtype]
    return dtype


def pick_kv_dtype(dtype: torch.dtype | str | None, *, call: str) -> torch.dtype | None:
    """The dtype of a KV cache, from a name or a dtype; None stays None.

    Raises:
        RequestError: no KV cache has this dtype.
    """
    check_values(call, _RULES, {"kv_dtype": dtype})
    if isinstance(dtype, str):
        return KV_DTYPES[dtype]
    return dtype


def pick_stage(stage: tuple[int, int] | None, *, call: str) -> tuple[int, int]:
    """The index of a stage and the number of stages; None: the only one.

    Raises:
        ProgramError: the model has no stage of this index.
    """
    check_values(call, _RULES, {"stage": stage}, ProgramError)
    if stage is None:
        return (0, 1)
    return stage


def pick_shard(shard: tuple[int, int] | None, *, call: str) -> tuple[int, int]:
    """The index of a rank's share of each layer, and the number of ranks; None: the only one.

    Raises:
        ProgramError: there is no share of this index.
    """
    check_values(call, _RULES, {"shard": shard}, ProgramError)
    if shard is None:
        return (0, 1)
    return shard


def pick_experts(
    experts: str | None, config: ModelConfig, num_ranks: int, *, call: str
) -> ModelConfig:
    """The configuration, with this way of sharing experts between ranks; None: unchanged.

    Raises:
        ConfigError: the model has no experts, or there is only one rank.
        RequestError: there is no such way.
    """
    check_values(call, _RULES, {"experts": experts})
    if experts is None:
        return config
    if config.moe is None or num_ranks == 1:
        if config.moe is not None:
            problem = "one rank"
        else:
            problem = f"a {config.architecture}, which has no experts"
        if config.moe is not None:
            instead = "leave it out, or several ranks that share each layer"
        else:
            instead = "leave it out"
        raise ConfigError(call, f"experts={experts!r}, and {problem}", instead)
    return attrs.evolve(config, moe=attrs.evolve(config.moe, sharing=experts))


def pick_leaves(
    leaves: int, config: ModelConfig, batch_invariant: bool, num_ranks: int, *, call: str
) -> int:
    """The number of leaves of each sum that ranks may share.

    Raises:
        ConfigError: the model's sums cannot be cut into them, or the ranks cannot share them.
        RequestError: not a power of two, or not batch invariant.
    """
    check_values(call, _RULES, {"reduction_leaves": leaves})
    if leaves > 1 and not batch_invariant:
        problem = "a model that is not batch invariant"
        raise RequestError(
            f"{call} with reduction_leaves={leaves}", problem, "batch_invariant=True, too"
        )
    check_leaves(call, config, leaves, num_ranks)
    return leaves


def check_backend(
    backend: AttentionBackend,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    *,
    call: str,
) -> None:
    """Raise DeviceError or ProgramError unless an attention back end can run the model."""
    check_support(
        backend,
        call,
        device,
        dtype,
        config.head_dim,
        max(config.windows, default=0),
        kv_dtype,
        batch_invariant,
    )


def pick_attention(
    attention: str | AttentionBackend,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    *,
    call: str,
) -> AttentionBackend | None:
    """The attention back end, from a name or a value. None: the decoder chooses the fastest kernel
    for each step; in an FP8 model, a kernel that also quantises its result.

    Raises:
        DeviceError: it does not run on the device.
        ProgramError: it has no kernels for the model, or is not batch invariant and has to be.
        RequestError: an unknown name, or a `batch_invariant` that is not a bool.
    """
    check_values(call, _RULES, {"attention": attention, "batch_invariant": batch_invariant})
    chosen = OWN[device.type] if attention == "auto" else BACKENDS.get(str(attention))
    chosen = attention if isinstance(attention, AttentionBackend) else chosen
    assert isinstance(chosen, AttentionBackend), "the rule holds"
    check_backend(chosen, config, device, dtype, kv_dtype, batch_invariant, call=call)
    is_default = attention == "auto" or device.type == "cpu" or config.fp8 is not None
    return None if is_default and chosen is OWN[device.type] else chosen
