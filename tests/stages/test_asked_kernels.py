"""While kernels are only asked for, two of the layers that are alike ask for those of all, on a GPU's operators: here
they take tensors on the CPU, in a process of their own, and nothing is launched."""

import json
import subprocess
import sys

import pytest

_ASKED = """
import json, sys, torch
implement = torch.library.impl

def on_the_cpu_too(name, kind, function=None, **more):
    if name.startswith("weft::") and kind in ("CPU", "CUDA"):
        if kind == "CUDA":
            implement(name, "CPU", function)
        return None
    return implement(name, kind, function, **more)

torch.library.impl = on_the_cpu_too
import weft
from weft.batch import Batch
from weft.ops import kernel_triton
from weft.ops.constants import ASKED
from weft.sampling import SamplingParams
from weft.stages import layers
from weft.stages.config import parse_config
from weft.stages.random_weights import PRESETS, random_model
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits
from weft.transforms.graphs.lower import _Zeros

def ask(kernel, asked, grid, *args, **options):
    kernel._check_constants(args)
    asked[(kernel.jit.fn.__name__, *map(str, kernel_triton._kinds(args, options)))] = True

kernel_triton.Kernel._compile = ask
raw = {**PRESETS[sys.argv[1]], "num_hidden_layers": 4, "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
raw |= {"num_experts": 8, "moe_intermediate_size": 128} if "num_experts" in raw else {}
model = random_model(parse_config(raw, source="a preset"), seed=0, device="cpu")
sampling = SamplingParams(temperature=1.0, seed=0)
runner, asked, two = make_runner(model, Limits(32, 256), mode="none"), [], layers._layers_to_run
for chosen in (lambda *given: given[-1], two, lambda *given: given[-1][:1]):
    layers._layers_to_run = chosen
    asked.append({})
    token = ASKED.set(asked[-1])
    for batch in (*(Batch.decode(range(n)) for n in (1, 3, 16, 32)), Batch.ragged([0, 1], [[1] * 40, [2]])):
        state = make_state(model, runner.layouts, [64] * 32, [sampling] * 32)
        with _Zeros():
            runner.step(runner.params, state, batch)
    ASKED.reset(token)
print(json.dumps([sorted(map(str, own)) for own in asked]))
"""


@pytest.mark.parametrize("preset", ["qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b-fp8", "qwen3-32b-fp8"])
def test_two_layers_ask_for_the_kernels_of_all(preset: str) -> None:
    pytest.importorskip("triton")
    told = subprocess.run([sys.executable, "-c", _ASKED, preset], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    whole, two, one = json.loads(told.stdout)
    assert whole == two
    assert len(one) < len(whole), "the norm of a first layer adds nothing"
    assert any("attend_kernel" in kind for kind in whole)
