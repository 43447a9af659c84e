"""The context around a call of a pipeline also applies in the threads of its ranks, or is refused.
This is tested for each public context manager of torch, by what stages see under `Local`."""

import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.attention
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.errors import CaptureError, ProgramError
from weft.torchapi.ambient import PER_THREAD
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads

# What hooks were called with, in order.
HOOKED: list[str] = []


def _noted(x: Tensor) -> Tensor:
    HOOKED.append(str(tuple(x.shape)))
    return x


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


graph: Any = torch.autograd.graph
# Public contexts of torch.
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "DisableTorchFunction": torch._C.DisableTorchFunction,
    "DisableTorchFunctionSubclass": torch._C.DisableTorchFunctionSubclass,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "set_detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "dual_level": lambda: torch.autograd.forward_ad.dual_level(),
    "allow_mutation_on_saved_tensors": graph.allow_mutation_on_saved_tensors,
    "disable_saved_tensors_hooks": lambda: graph.disable_saved_tensors_hooks("not here"),
    "save_on_cpu": graph.save_on_cpu,
    "saved_tensors_hooks": lambda: graph.saved_tensors_hooks(_noted, _noted),
    "set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
    "flags": lambda: torch.backends.nnpack.flags(enabled=False),
    "device": lambda: torch.device("meta"),
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "sdpa_kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "cached": lambda: torch.nn.utils.parametrize.cached(),
    "TorchFunctionMode": Function,
    "TorchDispatchMode": Dispatch,
    "check_sparse_tensor_invariants": lambda: torch.sparse.check_sparse_tensor_invariants(True),
    "set_checkpoint_debug_enabled": (
        lambda: torch.utils.checkpoint.set_checkpoint_debug_enabled(True)
    ),
    "set_checkpoint_early_stop": (lambda: torch.utils.checkpoint.set_checkpoint_early_stop(False)),
}

# Contexts that two threads cannot share
REFUSED = (
    "TorchFunctionMode",
    "TorchDispatchMode",
    "allow_mutation_on_saved_tensors",
    "dual_level",
)

LOOKS = "it looks at operators and changes none"
ON_GPU = "it needs a GPU; `test_cuda_streams` has the stream"
NO_CONTEXT = "a class that has __enter__ and is in force nowhere"
# The others, each with a reason.
OTHER = {
    "ExcludeDispatchKeyGuard": "private in all but its name",
    "enforce_grad_layout_policy": "backward consults it, which runs in the caller's thread",
    "node_creation_hook": "torch has no way to ask for the hooks in force",
    "enable_reentrant_dispatch": "for the inside of __torch_dispatch__",
    "fork_rng": "the default generator is global",
    "verbose": LOOKS,
    "emit_itt": LOOKS,
    "emit_nvtx": LOOKS,
    "profile": LOOKS,
    "record_function": LOOKS,
    "LoggingTensorMode": LOOKS,
    "capture_logs": LOOKS,
    "Stream": ON_GPU,
    "Graph": ON_GPU,
    "device_index": ON_GPU,
    "BaseTorchFunctionMode": "the base of the function modes",
    "Join": "of processes",
    "setup_compilation_env": "for the inside of torch's higher-order operators",
    "StreamContext": "the CPU has no streams",
    "RemovableHandle": NO_CONTEXT,
    "GraphExecGroup": "for one checkpoint",
}
ROOMS = (
    "torch.autograd",
    "torch.accelerator",
    "torch.amp",
    "torch.backends",
    "torch.cpu",
    "torch.nn",
    "torch.overrides",
)
ROOMS += ("torch.random", "torch.sparse", "torch.utils.checkpoint")
"""The public modules of torch that are searched for contexts, besides `torch` itself; `torch.cuda`
is for GPUs."""


def public_contexts() -> set[str]:
    """torch's public context managers, by name."""
    names: set[str] = set()
    for module_name, module in list(sys.modules.items()):
        is_searched = module_name == "torch" or module_name.startswith(ROOMS)
        if is_searched and "._" not in module_name:
            names |= {
                name
                for name, value in list(vars(module).items())
                if _is_public_context(name, value)
            }
    return names


def _is_public_context(name: str, value: Any) -> bool:
    if inspect.isfunction(value):
        is_context = inspect.isgeneratorfunction(vars(value).get("__wrapped__"))
    else:
        is_context = (
            isinstance(value, type) and hasattr(value, "__enter__") and hasattr(value, "__exit__")
        )
    return is_context and not name.startswith("_") and value.__module__.startswith("torch")


# The version of torch whose contexts were sorted
LATEST = (2, 14)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) > LATEST,
    reason="nobody has sorted its new contexts yet",
)
def test_every_public_context_of_torch_is_tried_or_has_a_reason() -> None:
    assert public_contexts() <= CONTEXTS.keys() | OTHER.keys()


def seen_by_stages(transport: Transport) -> list[Any]:
    """What stages on two ranks see of their surroundings."""
    hooks: Any = torch._C._autograd

    def look(p: Any, s: Any, batch: Tensor, x: Any) -> tuple[Any, Any]:
        previous = [] if x is None else x
        product = torch.sin(batch @ p.clone())
        refusal = ""
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                pass
        except RuntimeError as error:
            refusal = str(error)
        return s, [
            *previous,
            product.requires_grad,
            product.is_inference(),
            product.dtype,
            torch.empty(1).device,
            torch.is_anomaly_enabled(),
            torch._C._is_multithreading_enabled(),
            torch._C._is_fwd_grad_enabled(),
            torch._C._is_torch_function_enabled(),
            torch._C._is_torch_function_all_disabled(),
            torch._C._get_nnpack_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.sparse.check_sparse_tensor_invariants.is_enabled(),
            torch.autograd.forward_ad._current_level,
            hooks._top_saved_tensors_default_hooks(True) is None,
            refusal,
        ]

    params = [torch.eye(2).requires_grad_() for _ in range(2)]
    HOOKED.clear()
    step = pipeline([look, look], transport=transport)
    return [*step(params, [None, None], torch.ones(3, 2))[1], *HOOKED]


@pytest.mark.parametrize("name", CONTEXTS)
def test_stages_in_threads_see_what_they_see_in_one_thread(name: str) -> None:
    outside = seen_by_stages(Local())
    threads = Threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with CONTEXTS[name]():
            expected = seen_by_stages(Local())
            if name in REFUSED:
                with pytest.raises(
                    (CaptureError, ProgramError),
                    match=r"saw: (Threads\(\) runs stages|ranks outside)",
                ):
                    seen_by_stages(threads)
            else:
                assert seen_by_stages(threads) == expected
    assert seen_by_stages(threads) == outside, "it ends with the call"


NEEDED_BY = {
    "inference mode": "inference_mode",
    "grad mode": "no_grad",
    "threads of autograd": "set_multithreading_enabled",
    "autocast": "autocast",
    "default device": "device",
    "hooks on saved tensors": "saved_tensors_hooks",
    "__torch_function__": "DisableTorchFunction",
}


@pytest.mark.parametrize("part", NEEDED_BY)
def test_the_test_above_finds_what_is_left_behind(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(PER_THREAD, part)
    with pytest.raises(AssertionError):
        test_stages_in_threads_see_what_they_see_in_one_thread(NEEDED_BY[part])


@pytest.mark.gpu
def test_cuda_streams() -> None:
    stream = torch.cuda.Stream()

    def look(p: Any, s: Any, batch: Tensor, x: Any) -> tuple[Any, Any]:
        return s, [*(x or []), torch.cuda.current_stream()]

    torch.ones(1, device="cuda")
    with torch.cuda.stream(stream):
        streams = pipeline([look, look], transport=Threads())(
            [None] * 2, [None] * 2, torch.ones(1)
        )[1]
    assert streams == [stream, stream]


def test_hooks_on_saved_tensors_may_be_any_pair() -> None:
    params = [torch.randn(4, 5).requires_grad_(), torch.randn(5, 2).requires_grad_()]
    stages = [lambda p, s, b, x: (s, torch.tanh(b @ p)), lambda p, s, b, x: (s, x @ p)]
    grads = []
    for transport in (Local(), Threads()):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            output = weft.pipeline(stages, microbatches=2, transport=transport)(
                params, [None, None], torch.ones(8, 4)
            )[1]
        grads.append(torch.autograd.grad(output.sum(), params))
    for local, threaded in zip(*grads, strict=True):
        assert torch.equal(local, threaded)
