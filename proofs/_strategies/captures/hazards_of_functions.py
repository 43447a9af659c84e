"""The kinds of hazards in what a function does: its host reads, its errors, and what it keeps or
reads outside of itself."""

from weft.proofs._strategies.captures.hazards_of_calls import Kind

# The kinds of hazards in what a function does, by name.
OF_FUNCTIONS: dict[str, Kind] = {
    # The capture refuses by an error, which the function catches; it must be refused all the same.
    "a swallowed refusal": Kind(
        """
def f(x):
    found = 1.0
    try:
        found = $read
    except $errors:
        pass
    return x / found
""",
        {
            "read": (
                "float(x.max())",
                "x[0].item()",
                "int(x[1])",
                "x.tolist()[2]",
                "3.0 if x.sum() > 7 else 2.0",
            ),
            "errors": ("Exception", "RuntimeError", "BaseException"),
        },
        refused=True,
    ),
    # Torch's composite operators take another path while a dispatch mode is active, so that a
    # capture must not watch by one.
    "a composite that asks for modes": Kind(
        """
def arguments(call):
    return torch.tensor([0.0, 2.0, 3.0], device=device) * (1 + call),

def f(x):
    with torch.enable_grad():
        q = x.detach().requires_grad_()
        return torch.autograd.grad($loss, q)[0]
""",
        {
            "loss": (
                "(1000 * q.max()).exp()",
                "q.prod()",
                "torch.masked.prod(q, mask=q > 1)",
                "torch.linalg.svdvals(torch.outer(q, q) + torch.eye(3, device=device)).sum()",
                "torch.linalg.cond(torch.outer(q, q) + torch.eye(3, device=device))",
            )
        },
        refused=True,
    ),
    # A replay cannot run the function's handler: only an operator's error ends it.
    "an error of an operator": Kind(
        """
def arguments(call):
    singular = torch.tensor([[0.0, 0.0], [0.0, $value]], device=device)
    return torch.eye(2, device=device) * (1 + call) if call $when else singular,

def f(a):
    try:
        return $operator
    except torch.linalg.LinAlgError:
        return a * 0 + 7
""",
        {
            "value": ("0.0", "-1.0"),
            "when": ("== 1", "== 0", "> 0"),
            "operator": (
                "torch.linalg.cholesky(a)",
                "torch.linalg.inv(a)",
                "torch.linalg.solve(a, a)",
            ),
        },
        refused=True,
    ),
    # The capture is the first run, so what is kept would be a tensor of the graph.
    "a tensor kept by the first run": Kind(
        """
kept = {}

def f(x):
    kept.setdefault("first", $kept)
    return x - kept["first"]
""",
        {"kept": ("x.detach()", "x * 1", "x", "x.view(-1)", "x.clone().mul_(2)")},
        refused=True,
    ),
    # A replay would return a new result, and not renew the one that the function keeps.
    "a result that is kept too": Kind(
        """
class Box:
    pass

last = torch.zeros(3, device=device)
box = Box()
box.last = torch.zeros(3, device=device)
kept = {"last": torch.zeros(3, device=device), "all": [torch.zeros(3, device=device)]}

def f(x):
    global last
    $kept
""",
        {
            "kept": (
                "last = last + x; return last",
                "box.last = box.last + x; return box.last",
                "kept['last'] = kept['last'] + x; return {'a': x * 2, 'b': kept['last']}",
                "kept['all'][0] = kept['all'][0] + x; return kept['all'][0][1:]",
                "total = kept['last'] + x; kept['last'] = total[:]; return total",
                "total = last + x; return total, total.view(-1)",
            )
        },
        refused=True,
    ),
    # A script may read values without an operator that a capture would see.
    "a read by TorchScript": Kind(
        """
unit = torch.jit.CompilationUnit('''
$script
''')

def f(x):
    return unit.scripted(x)
""",
        {
            "script": (
                (
                    "def scripted(x: Tensor) -> Tensor:\n    l: List[float] = x.tolist()\n   "
                    " return x * l[0]"
                ),
                (
                    "def scripted(x: Tensor) -> Tensor:\n    return x * len('{}'.format(x.sum() *"
                    " 1000))"
                ),
                "def scripted(x: Tensor) -> Tensor:\n    return x * float(x[0])",
                "def scripted(x: Tensor) -> Tensor:\n    return x * 2",
            )
        },
        refused=True,
        on_gpu=False,
    ),
    # Each of these replaces the memory of a parameter, or the parameter, that a graph reads; the
    # last one only writes to it.
    "new storage of parameters": Kind(
        """
layer = nn.Linear(3, 2, device=device).requires_grad_(False)
nn.init.constant_(layer.weight, 0.5)
nn.init.constant_(layer.bias, 0.25)

def before(call):
    if call == $when:
        $change

def f(x):
    return layer(x)
""",
        {
            "when": ("1", "2", "0"),
            "change": (
                "layer.weight.data = layer.weight + 1",
                (
                    "nn.utils.vector_to_parameters(torch.arange(8.0, device=device),"
                    " layer.parameters())"
                ),
                "layer.weight = nn.Parameter(layer.weight * 3, requires_grad=False)",
                (
                    "layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()},"
                    " assign=True)"
                ),
                "layer.bias.set_(torch.ones(2, device=device))",
                (
                    "torch.utils.swap_tensors(layer.bias, nn.Parameter(torch.ones(2,"
                    " device=device), False))"
                ),
                "layer.weight.add_(1)",
            ),
        },
    ),
    # Arguments do not change here: only what the function's names stand for.
    "names bound anew": Kind(
        """
weight = torch.ones(3, device=device)

def helper(x):
    return x * weight

def make(inner):
    def rebind(new):
        nonlocal inner
        inner = new

    def f(x):
        return helper(x) + inner

    return f, rebind

f, rebind = make(torch.ones(3, device=device))

def before(call):
    global weight, helper
    if call == $when:
        $change
""",
        {
            "when": ("1", "2"),
            "change": (
                "weight = torch.full((3,), 5.0, device=device)",
                "helper = lambda x: x - weight",
                "rebind(torch.zeros(3, device=device))",
                "weight = 2.0",
            ),
        },
    ),
    # `verify` runs the function itself, which must not take the fast path that a capture never has.
    "attention of torch with a fast path": Kind(
        """
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, device=device).eval().requires_grad_(False)
attention = layer.self_attn
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(False)
padding = torch.tensor([[False, False, False], [False, False, True]], device=device)

def arguments(call):
    return torch.arange(24.0, device=device).add(call).sin().reshape(2, 3, 4),

def around(call):
    return torch.set_grad_enabled($grad)

def run(x):
    return $module

def f(x):
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return run(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)

graph = weft.graphify(run, verify=$verify)
""",
        {
            "grad": ("True", "False", "call % 2 == 0"),
            "module": (
                "encoder(x)",
                "encoder(x, src_key_padding_mask=padding)",
                "layer(x)",
                "attention(x, x, x, need_weights=False)[0]",
                "attention(x, x, x, key_padding_mask=padding)",
            ),
            "verify": ("None", "1", "2"),
        },
    ),
    # `from_module` makes a state of tensors that a module keeps; numbers, sets and closures cannot
    # be in it, and would be frozen by a graph.
    "what a module keeps in its objects": Kind(
        """
import collections
import copy
import types

import attrs

@attrs.define(slots=True)
class Slots:
    inner: object

class Box:
    shared = 1

    def __init__(self):
        self.value = torch.zeros(3, device=device)
        self.entries = [self.value]
        self.pair = (torch.ones(3, device=device), 2)
        self.by_name = collections.OrderedDict(a=torch.ones(3, device=device))
        self.count = 1
        self.flag = False
        self.seen = set()

def nonlocal_counter():
    count = 0
    def bump():
        nonlocal count
        count += 1
        return count
    return bump

def box_in(held):
    while not isinstance(held, Box):
        if isinstance(held, (list, tuple)):
            held = held[-1]
        else:
            held = held["inner"] if isinstance(held, dict) else held.inner
    return held

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = $held
        self.bump = nonlocal_counter()

    def forward(self, x):
        box = box_in(self.held)
        $change
        total = box.value + box.entries[0] + box.pair[0] * box.pair[1] + box.by_name["a"]
        return x * box.count + total * box.shared + box.flag + len(box.seen)

module = Module()
made = weft.stages.from_module(copy.deepcopy(module))
graphed = weft.graphify(made.stage)
state = made.state

def f(x):
    return module(x)

def graph(x):
    global state
    state, y = graphed(made.params, state, x, None)
    return y
""",
        {
            "held": (
                "Box()",
                "[1, Box()]",
                "{'inner': [Box()]}",
                "types.SimpleNamespace(inner=(Box(),))",
                "Slots(collections.deque([Slots(Box())])[0])",
            ),
            "change": (
                "box.value = box.value + x; box.entries[0] = box.value",
                "box.value.add_(x)",
                "box.value = box.value + x",
                "box.pair = (box.pair[0] + x, box.pair[1])",
                "box.pair = (box.pair[0], box.pair[1] + 1)",
                "box.by_name = collections.OrderedDict(a=box.by_name['a'] + x)",
                "box.count += 1",
                "box.flag = not box.flag",
                "box.seen.add(len(box.seen))",
                "type(box).shared += 1",
                "x = x * self.bump()",
                "box.entries.insert(0, x.clone())",
            ),
        },
        refused=True,
    ),
    # These kernels ask for grad mode while they run, so a replay must run in the mode of its
    # capture.
    "kernels that ask for modes": Kind(
        """
torch.manual_seed(0)
sparse = torch.eye(3, device=device).to_sparse()
lstm = nn.LSTM(3, 3, device=device).requires_grad_(False)

def arguments(call):
    return torch.arange(9.0, device=device).add(call).sin().reshape(3, 3),

def around(call):
    return torch.set_grad_enabled(call $when)

def f(x):
    return $body
""",
        {
            "when": (">= 0", "== 1", "< 0"),
            "body": (
                "lstm(x)[0]",
                "torch.vmap(lambda a: a * 2)(x)",
                "torch.vmap(torch.func.grad(lambda a: 0.5 * (a @ a) ** 2))(x)",
                "torch.sparse.mm(sparse, x)",
                "(x, torch.Size(x.shape[1:]), x.shape)",
            ),
        },
    ),
    # If a capture drew from the default generator and put it back, another thread would draw a
    # number twice.
    "other threads' random numbers": Kind(
        """
@contextlib.contextmanager
def around(call):
    drawn, stop = [], threading.Event()

    def draw():
        while not stop.is_set():
            drawn.append(tuple(torch.rand(4).tolist()))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if len(drawn) > len(set(drawn)):
        raise RuntimeError("another thread drew a number twice")

def arguments(call):
    return torch.ones(2 + call),

def f(x):
    for _ in range($times):
        x = x + 0 * $draw
    return x
""",
        {
            "times": ("30", "60"),
            "draw": ("torch.rand(1)", "torch.randn_like(x)", "x.bernoulli(0.5)"),
        },
        options={"calls": 6, "draws": False},
        on_gpu=False,
    ),
    # The second micro-batch gets the state that the first one lent, and overwrites it.
    "a borrowed state in micro-batches": Kind(
        """
def step(params, state, batch):
    state = $state
    return state, batch * $out

f = weft.microbatch(step, 2)
graph = weft.microbatch(weft.graphify(step, outputs="borrow"), 2)

params = torch.ones(1, device=device)

def arguments(call):
    return params, torch.zeros(1, device=device), torch.arange(4.0, device=device).add(call)
""",
        {
            "state": ("state + batch.sum()", "batch.sum()[None] * params"),
            "out": ("state", "params", "2"),
        },
    ),
    # One rank would overwrite what another has not read yet.
    "one borrowed stage on several ranks": Kind(
        """
def stage(params, state, batch, x):
    y = batch if x is None else x
    return state + y.sum(), y * params + $more

f = weft.pipeline([stage] * 3, microbatches=2)
lent = [weft.graphify(stage, outputs="borrow") for _ in range($graphs)]
transport = weft.transforms.$transport()

def graph(*args):
    return weft.pipeline((lent * 3)[:3], microbatches=2, transport=transport)(*args)

params = (torch.full((1,), 2.0, device=device),) * 3

def arguments(call):
    x = torch.arange(4.0, device=device).add(call)
    return params, tuple(torch.zeros((), device=device) for _ in range(3)), x
""",
        {"more": ("1", "batch"), "graphs": ("1", "2", "3"), "transport": ("Threads", "Local")},
        refused=True,
        options={"calls": 6},
    ),
    # As for names, in every kind of place; `module.eval()` replaces no tensor, and changes the
    # result all the same.
    "tensors put in their places anew": Kind(
        """
from collections import OrderedDict, deque

class Holder:
    pass

class Slotted:
    __slots__ = ("weight",)

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.ones(3, device=device)
        self.all = [self.weight * 2]

    def forward(self, x):
        if self.training:
            x = x * 2
        return x * self.weight + self.all[0]

a_dict = OrderedDict(weight=torch.ones(3, device=device), all=[torch.ones(3, device=device)])
a_list = [torch.ones(3, device=device), 1.0, {"weight": torch.ones(3, device=device)}]
a_deque = deque([torch.ones(3, device=device)])
module = Module()
an_object = Holder()
an_object.weight = torch.ones(3, device=device)
an_object.inner = a_list
slotted = Slotted()
slotted.weight = torch.ones(3, device=device)

def f(x):
    x = module(x * a_dict["weight"] + a_list[0]) * an_object.weight - a_dict["all"][0]
    return x + slotted.weight - a_deque[0] * an_object.inner[2]["weight"]

def before(call):
    new = torch.full((3,), 5.0, device=device)
    if call == $when:
        $change
""",
        {
            "when": ("1", "2"),
            "change": (
                "a_dict['weight'] = new",
                "a_list[0] = new",
                "a_dict['all'] = [new]",
                "a_list[2] = {'weight': new}",
                "a_list[2]['weight'] = new",
                "a_deque[0] = new",
                "a_deque.appendleft(new)",
                "an_object.weight = new",
                "slotted.weight = new",
                "module.weight = new",
                "module.all[0] = new",
                "module.all = [new]",
                "module.eval()",
            ),
        },
    ),
    # A replay does not bind them, and would use what they were at the capture.
    "names that a run binds and uses": Kind(
        """
steps = 0
flag = False
rate = 1.0
word = ""

def make():
    steps = 0
    flag = False
    rate = 1.0
    word = ""

    def f(x):
        $scope
        $change
        return x * steps * rate + flag + len(word)

    return f

f = make()
""",
        {
            "scope": ("nonlocal steps, flag, rate, word", "global steps, flag, rate, word"),
            "change": (
                "steps += 1",
                "steps = steps + 2",
                "rate *= 0.5",
                "flag = not flag",
                "word += 'a'",
                "steps, rate = steps + 1, rate / 2",
                "steps = len(x)",
                "steps += 1 if steps < 1 else 0",
            ),
        },
        refused=True,
    ),
}
