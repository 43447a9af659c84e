"""`Kind`, a kind of hazard as code with parameters, and the kinds in the arguments and surroundings
of a call."""

from collections.abc import Mapping

import attrs


@attrs.frozen
class Kind:
    """One kind of hazard: what user code does that a replay would not do again.

    Args:
        code: the program, with `$name` for each parameter.
        parameters: the values of each parameter.
        refused: whether weft may refuse it. If not, a graph gives the function's results.
        options: the other arguments of `TensorProgram`.
        on_gpu: whether it can run on a GPU.
    """

    code: str
    parameters: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    refused: bool = False
    options: Mapping[str, object] = attrs.field(factory=dict)
    on_gpu: bool = True


# The kinds of hazards in the arguments and the surroundings of a call, by name.
OF_CALLS: dict[str, Kind] = {
    # A capture must draw from this generator and advance it, and not torch's default one.
    "a generator argument": Kind(
        """
one = torch.Generator(device).manual_seed(5)

def arguments(call):
    return torch.ones(2, device=device), $generator

def f(x, generator):
    return x + $draw, $draw
""",
        {
            "generator": ("torch.Generator(device).manual_seed(call)", "one"),
            "draw": (
                "torch.rand(2, generator=generator, device=device)",
                "torch.empty_like(x).normal_(generator=generator)",
                "torch.randperm(2, generator=generator, device=device)",
            ),
        },
    ),
    # A replay must not enter the modes of its caller: the recorded operators ran inside the
    # function's own.
    "a mode outside and inside": Kind(
        """
class Halving(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result / 2 if "mul" in getattr(func, "__name__", "") else result

halving = Halving()

def arguments(call):
    return torch.arange(16.0, device=device).add(call).sin().reshape(4, 4),

def around(call):
    return $outside

def f(x):
    with $inside:
        y = x.matmul(x)
    return y.mul(3), x @ y.float()
""",
        {
            "outside": (
                "torch.autocast(device, dtype=torch.bfloat16)",
                "halving",
                "contextlib.nullcontext()",
            ),
            "inside": (
                "torch.autocast(device, enabled=False)",
                "contextlib.nullcontext()",
                "halving",
            ),
        },
    ),
    # The hook doubles what is saved, so the gradient differs with it: the hooks belong in a graph's
    # key.
    "hooks on saved tensors": Kind(
        """
def double(x):
    return x * 2

def same(x):
    return x

def around(call):
    return torch.autograd.graph.saved_tensors_hooks(double, same) if call $when else contextlib.nullcontext()

def f(x):
    with torch.enable_grad():
        q = x.detach().requires_grad_()
        return torch.autograd.grad($loss, q)[0]
""",
        {
            "when": ("== 1", "== 0", "!= 2"),
            "loss": ("q.square().sum()", "q.sin().sum()", "(q * q).mean()"),
        },
    ),
    # Two arguments may be one tensor, a parameter, or bear attributes: the function can ask for
    # each of these, so each belongs in the key.
    "the identity of arguments": Kind(
        """
def arguments(call):
    x, y = (torch.tensor([1.0, 2.0], device=device) + call + i for i in range(2))
    x.factor = y.factor = 1 + call // 2
    p = nn.Parameter(x * 2)
    return $made

def around(call):
    return torch.no_grad()

def f(x, y):
    return x * $asked + y
""",
        {
            "made": (
                "[x, x if call == 1 else y]",
                "[x, p]",
                "[p, p if call else p.clone()]",
                "[p.data, x]",
                "[x, y]",
            ),
            "asked": (
                "(2 if x is y else 3)",
                "len({x, y})",
                "(2 if isinstance(x, nn.Parameter) else 3)",
                "getattr(x, 'factor', 7)",
                "(2 + x.requires_grad + 4 * x.is_leaf)",
                "(2 + (type(x) is type(y)))",
            ),
        },
    ),
    # A graph copies arguments into buffers. An expanded one that is made dense there has other
    # strides.
    "the layout of arguments": Kind(
        """
def arguments(call):
    base = torch.arange(12.0, device=device).add(call).sin().reshape(3, 4)
    return $view,

def f(x):
    return x * $asked, x @ x.t()
""",
        {
            "view": (
                "base",
                "base[:1].expand(5, 4)",
                "base.t()",
                "base[:, ::2]",
                "base.as_strided((3, 3), (1, 1))",
            ),
            "asked": (
                "sum(x.stride())",
                "(2 if x.is_contiguous() else 3)",
                "x.expand(2, *x.shape).stride(1)",
            ),
        },
    ),
    # `functools.wraps` shows the signature of the inner function, whose defaults do not apply.
    "defaults of a decorator": Kind(
        """
def decorated(fn):
    @functools.wraps(fn)
    $wrapper
    return wrapper

def arguments(call):
    x = torch.tensor([1.0, 2.0], device=device) + call
    return (x, 5.0) if call == $given else (x,)

@decorated
def f(x, scale=$inner):
    return x * scale
""",
        {
            "wrapper": (
                "def wrapper(*args): return fn(*args, **({} if args[1:] else {'scale': 3.0}))",
                "def wrapper(x, scale=3.0): return fn(x, scale)",
                "def wrapper(x, scale=-1): return fn(x, scale)",
            ),
            "inner": ("2.0", "True"),
            "given": ("0", "1", "9"),
        },
    ),
    # 1, 1.0 and True are equal by `==`, and give results of different dtypes.
    "contexts of pytrees": Kind(
        """
class Scaled:
    def __init__(self, x, by):
        self.x, self.by = x, by

_pytree.register_pytree_node(Scaled, lambda s: ([s.x], s.by), lambda children, by: Scaled(children[0], by))

def arguments(call):
    return Scaled(torch.tensor([1, 2], device=device) + call, [$one, $other][call % 2]),

def f(s):
    return s.x * s.by, 1 / (s.x * s.by)
""",
        {"one": ("1", "1.0", "True"), "other": ("True", "1.0", "1", "2")},
    ),
    # Dropout depends on the module's mode, which may change between two calls with the same module.
    "a static module": Kind(
        """
module = $module

def arguments(call):
    return module, torch.ones(64, 4, device=device)

def before(call):
    module.train(call $when)

def f(self, x):
    return self(x)
""",
        {
            "module": ("nn.Dropout(0.5)", "nn.Sequential(nn.Dropout(0.3), nn.Identity())"),
            "when": ("== 0", "== 1", "!= 1"),
        },
        options={"static": ("self",)},
    ),
    # A replay runs tensors' operators only, and would leave the caller's container as it is.
    "a mutated container": Kind(
        """
def arguments(call):
    x = torch.tensor([1.0, 2.0], device=device) + call
    return $container, x

def f(state, x):
    $change
    return x * 2
""",
        {
            "container": ("{0: x + 1}", "[x + 1]", "{0: x + 1, 1: x}"),
            "change": ("state[0] = state[0] + x", "state.clear()", "state[0] = x", "state.pop(0)"),
        },
        refused=True,
    ),
    # A copy of the view, made before the state is written, would have other values than the view.
    "a view of what is donated": Kind(
        """
def arguments(call):
    state = torch.arange(6.0, device=device).reshape(2, 3) + call
    return state, $view

def f(state, x):
    state.add_(1)
    return state, x * 2
""",
        {
            "view": (
                "state[1:]",
                "state.t()",
                "state[:, 0]",
                "state.view(-1)",
                "torch.from_dlpack(state)",
                "state + 1",
            )
        },
        refused=True,
        options={"donated": ("state",)},
    ),
    # `from_dlpack` gives a second storage for the same memory, which only addresses reveal.
    "two donated tensors": Kind(
        """
def arguments(call):
    base = torch.arange(4.0, device=device) + call
    return $one, $other

def f(a, b):
    return a + 1, b * 2
""",
        {
            "one": ("base", "base[:2]", "torch.from_dlpack(base)"),
            "other": ("torch.from_dlpack(base)", "base[2:]", "base[:2]", "base.clone()"),
        },
        refused=True,
        options={"donated": ("a", "b")},
    ),
    "a decorator that sets a mode": Kind(
        """
def inside(x):
    return $body

f = $decorator(inside)
""",
        {
            "body": ("x * 2", "x.mul(2).add_(1)", "(x, x.sin())", "x.clone().zero_() + x"),
            "decorator": ("torch.inference_mode()", "torch.no_grad()", "torch.enable_grad()"),
        },
    ),
}
