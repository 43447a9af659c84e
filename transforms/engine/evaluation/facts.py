"""Digests of a model's weights and program, and the versions that run it: all that bits depend on
except the request."""

import hashlib
import platform
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft import __version__
from weft.batches.sampling import SamplingParams
from weft.meshes.collectives import AllGather
from weft.ops.register import triton_version
from weft.stages.checkpoints.digests import digest_params
from weft.stages.checkpoints.reading import stage_fields
from weft.stages.model import Model, model_facts
from weft.stages.shares import WHOLE, join_field
from weft.torchapi.private import changes_of
from weft.transforms.engine.evaluation.programs import digest_functions
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed, end_of
from weft.transforms.pipelines.transports.messaging.messages import as_bytes
from weft.values.trees import leaves_with_names

# The most tensors that are digested at a time.
_AT_ONCE = 8
# The most bytes that a digest copies from a device at a time.
_BYTES = 2**26


def facts_of(model: Model, transport: Transport) -> tuple[str, str, dict[str, str]]:
    """The digests of a model's weights and of its program, and the versions. These include the
    number of leaves that sums are cut into, or else the number of ranks that share each layer, if
    bits depend on it. With parts of the model in other processes, every rank makes the call."""
    facts = versions(model.device)
    ranks = model.shard[1]
    leaves = model.functions.reduction_leaves
    if leaves > 1:
        facts["sums"] = f"cut into {leaves} leaves"
    elif ranks > 1:
        facts["layers"] = f"each shared by {ranks} ranks"
    return digest_weights(model, transport), digest_program(model), facts


def seen_of(model: Model) -> tuple[str, str]:
    """A fingerprint that reveals later changes of a model's weights and functions: torch's counts
    of in-place changes, and four values of each tensor. It is empty unless the model is batch
    invariant, since other models have no certificates."""
    if not model.functions.batch_invariant:
        return "", ""
    return _glance(dict(_tensors(model))), digest_program(model, lambda x: _glance({"": x}))


def _glance(tensors: dict[str, Tensor]) -> str:
    return (
        f"{changes_of(x for x in tensors.values() if not x.is_inference())}"
        f" {digest_params(tensors)}"
    )


def digest_weights(model: Model, transport: Transport) -> str:
    """A digest of the bytes of all weights of a model, and of the models beside it. It covers the
    whole model, however ranks share it, and every rank makes the call."""
    digests = dict[str, str]()
    pending = deque[tuple[str, Future[str]]]()
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        for name, x in _whole_tensors(model, transport):
            pending.append((name, pool.submit(_digest_tensor, x)))
            # A bound on the tensors that wait for their digests, whole ones put together among
            # them.
            if len(pending) > _AT_ONCE:
                digests |= _ended(pending)
        while pending:
            digests |= _ended(pending)
    weight_digests = {
        name: text for part in transport.collect(digests) for name, text in part.items()
    }
    # Sorted by name, since the order in which ranks report depends on the split, and the digest
    # must not.
    return _short(f"{name} {weight_digests[name]}\n" for name in sorted(weight_digests))


def _ended(pending: deque[tuple[str, Future[str]]]) -> dict[str, str]:
    name, digest = pending.popleft()
    return {name: digest.result()}


def _whole_tensors(model: Model, transport: Transport) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of a stage, one by one, joined from the parts on the ranks that share
    it."""
    index, count = model.shard
    if not isinstance(transport, Distributed) or count == 1:
        yield from _tensors(model)
        return
    first = transport.rank - index
    among = AllGather(tuple(range(first, first + count)))
    whole, *rank_fields = (
        dict(stage_fields(model.config, model.layout, share))
        for share in (WHOLE, *((i, count) for i in range(count)))
    )
    for name, x in _tensors(model):
        if name == "lm_head" and name not in whole:
            # A tied head is the embedding's matrix, and is cut into shares as that is.
            path = "embed_tokens"
        else:
            path = name
        if path in whole and any(fields[path] != whole[path] for fields in rank_fields):
            flat = end_of(transport).perform(among, as_bytes(x.contiguous()), 0)
            every = [part.view(x.dtype).view(x.shape) for part in flat.chunk(count)]
            x = join_field(every, [fields[path] for fields in rank_fields], whole[path])
        yield name, x


def digest(tree: Any) -> str:
    """A digest of the bytes of a tree of tensors."""
    return _short(f"{name} {_digest_tensor(x)}\n" for name, x in leaves_with_names(tree))


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model under names that do not depend on the split, the weights of the models
    beside it, and the default values that custom functions read."""
    params = model.params
    for name, x in (
        ("embed_tokens", params.embed_tokens),
        ("norm", params.norm),
        ("lm_head", params.head),
    ):
        if x is not None:
            yield name, x
    for layer in model.params.layers:
        for name, x in leaves_with_names(layer):
            if isinstance(x, Tensor):
                yield f"layers.{layer.index}{name}", x
    for name, other in sorted(model.functions.beside.items()):
        for inner, x in _tensors(other):
            yield f"beside {name} {inner}", x
    for kind in ("extras", "carries", "token_extras"):
        for name, x in sorted(getattr(model.functions, kind).items()):
            yield f"{kind} {name}", x


def _digest_tensor(x: Tensor) -> str:
    # With shape and dtype: the same bytes in another shape are other weights.
    hasher = hashlib.sha256(f"{tuple(x.shape)} {x.dtype} ".encode())
    if x.numel():
        # torch conjugates and negates lazily, by flags that the bytes do not show.
        flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    else:
        flat = x.new_empty(0, dtype=torch.uint8)
    for part in flat.split(_BYTES):
        hasher.update(part.cpu().numpy())
    return hasher.hexdigest()


def _short(lines: Iterable[str]) -> str:
    hasher = hashlib.sha256()
    for line in lines:
        hasher.update(line.encode())
    return f"sha256:{hasher.hexdigest()}"


def digest_program(model: Model, of_tensor: Callable[[Tensor], str] = _digest_tensor) -> str:
    """A digest of a model's program: of its configuration, and of the custom functions in its
    stages with the values that they read. It names the types of values that have no digest."""
    facts = {name: value for name, value in model_facts(model).items() if name != "weights"}
    functions, undigested = digest_functions(model, of_tensor)
    digest = _short([*(f"{name}: {value}\n" for name, value in facts.items()), functions])
    if undigested:
        return f"{digest}, without {', '.join(undigested)}"
    return digest


def digest_tokenizer(model: Model, sampling: SamplingParams) -> str | None:
    """A digest of a model's tokenizer, if a completion depends on it: `stop` compares texts, and
    `bad_words` bars the tokens of words. None otherwise, when only token ids matter."""
    if model.tokenizer is None or not (sampling.stop or sampling.bad_words):
        return None
    return _short([model.tokenizer.to_str()])


def versions(device: torch.device) -> dict[str, str]:
    """The versions of weft, Python, torch and triton, and the device."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    facts = {"weft": f"{__version__}, source {_digest_sources()}", "torch": torch.__version__}
    facts["python"] = ".".join(platform.python_version_tuple()[:2])
    if on_cuda:
        facts |= {"triton": str(triton_version()), "cuda": str(torch.version.cuda)}
    return {**facts, "machine": platform.machine(), "device": name}


@cache
def _digest_sources() -> str:
    """A digest of weft's files that take part in computing, including kernels and tables of
    tiles."""
    root = Path(__file__).parents[3]
    paths = [
        path
        for name in ("ops", "stages", "torchapi", "transforms")
        for path in (root / name).rglob("*")
    ]
    paths += root.glob("*.py")
    files = sorted(path for path in paths if path.suffix in (".py", ".json"))
    return _short(
        f"{file.relative_to(root)} {file.read_text(encoding='utf-8')}\n" for file in files
    )[7:19]
