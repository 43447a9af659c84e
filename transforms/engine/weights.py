"""`Weights`: the parameters of an engine's stages, and how they are updated while the engine
runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values
from weft.errors import RequestError
from weft.stages.adapters.adapter import Adapter
from weft.stages.adapters.slots import check_slot, stage_params, write_slot
from weft.stages.checkpoints.digests import digest_params
from weft.stages.checkpoints.reading import PartView, list_some, places, tensor_shapes, tied_names
from weft.stages.layer_fields import Part
from weft.stages.layout import StageLayout, split_layers
from weft.stages.model import Model
from weft.stages.params import DecoderParams
from weft.torchapi.private import changes_of
from weft.transforms.engine.options import RULES, Speculation
from weft.transforms.engine.split import Split
from weft.values.trees import leaves_with_names, tree_leaves

_PARAMS: Rule = (
    lambda new_params: (
        isinstance(new_params, DecoderParams)
        or (
            isinstance(new_params, Mapping)
            and all(isinstance(x, Tensor) for x in new_params.values())
        )
    ),
    "params of a weft.load(...), a state_dict() by transformers' names, or None: changed in place",
)
# The `params` of a model from `weft.load`; or tensors by transformers' names, as in a
# `state_dict()`.
Params = DecoderParams | Mapping[str, Tensor]


@attrs.define(eq=False)
class Weights:
    """The parameters of an engine, which its steps only read.

    Args:
        model: the model, whose tensors the stages share.
        stages: the layers and the parameters, with slots for adapters, of each stage that runs
            here.
        drafts: the parameters of a draft model, or None.
        adapters: the adapters by name, in the order of their slots, which hold copies of them.
    """

    model: Model
    stages: Sequence[tuple[StageLayout, DecoderParams]]
    drafts: Any
    adapters: Mapping[str, Adapter]
    _tracked: tuple[Tensor, ...] = attrs.field(init=False, repr=False)
    _change_count: int = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.mark_seen()

    def mark_seen(self) -> None:
        """Remember the present change counts of all tensors."""
        beside = [model.params for model in self.model.functions.beside.values()]
        stages = [params for _, params in self.stages]
        # Inference tensors have no change counter.
        leaves = tree_leaves((stages, self.drafts, beside, [*self.adapters.values()]))
        self._tracked = tuple(x for x in leaves if isinstance(x, Tensor) and not x.is_inference())
        self._change_count = changes_of(self._tracked)

    @property
    def slots(self) -> dict[str, int]:
        """The slot of each adapter, by name."""
        return {name: slot for slot, name in enumerate(self.adapters)}

    @property
    def are_changed(self) -> bool:
        """Whether a tensor was changed in place since `mark_seen`, as far as torch counts changes
        (`changes_of`)."""
        return changes_of(self._tracked) != self._change_count

    def pairs(self, call: str, params: Any) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a tensor of the engine and the new tensor that replaces it.

        Raises:
            RequestError: `params` are not parameters, or are those of another model.
        """
        check_values(call, {"params": _PARAMS}, {"params": params})
        if isinstance(params, DecoderParams):
            current = _tensors(self.model.params)
            params = _tensors(params)
            here = {name: PartView(x, Part(name, tuple(x.shape))) for name, x in current.items()}
            wrong = here.keys() ^ params.keys()
            instead = f"parameters of the structure of {self.model!r}"
            where = "which either the model or the given parameters lack"
        else:
            here = places(self.model.params, self.model.config, self.model.layout, self.model.shard)
            (whole,) = split_layers(self.model.config.num_layers, 1)
            tied = tied_names(self.model.config)
            wrong = (
                params.keys()
                - here.keys()
                - tensor_shapes(self.model.config, whole).keys()
                - tied.keys()
            )
            instead = f"names as {next(iter(here))!r}, of the model's own architecture"
            where = "which the model does not have"
            for second, first in tied.items():  # on every rank, even if it holds neither
                if {first, second} <= params.keys():
                    _refuse_two_values(
                        call, first, params[first], second, params[second], self.model.dtype
                    )
        if wrong:
            raise RequestError(call, f"{list_some(sorted(map(str, wrong)))}, {where}", instead)
        new = {name: x for name, x in params.items() if name in here}
        check_values(call, {name: _like(here[name]) for name in new}, new)
        return _once_each(
            call,
            {name: (here[name].view, here[name].share_of(x.detach())) for name, x in new.items()},
        )

    def digest(self, params: Any, adapters: Mapping[str, Adapter]) -> str:
        """One line about new parameters and adapters, which must be equal on all ranks."""
        digests = {name: adapter.weights for name, adapter in sorted(adapters.items())}
        return f"{self._digest(params)}, adapters={digests}"

    def _digest(self, params: Any) -> str:
        """A digest of new parameters, if they are the whole model's: only these are the same on all
        ranks."""
        if params is None:
            return "what was changed in place"
        (whole,) = split_layers(self.model.config.num_layers, 1)
        if (
            not isinstance(params, Mapping)
            or not params.keys() >= tensor_shapes(self.model.config, whole).keys()
        ):
            return "a part of the model"
        return digest_params([params[name] for name in sorted(params)])

    def check_adapters(self, call: str, adapters: Any) -> None:
        """Check new adapters against the engine's slots.

        Raises:
            RequestError: an adapter has a name that the engine does not have, or does not fit the
                slots.
        """
        check_values(call, RULES, {"adapters": adapters})
        adapters = adapters or {}
        instead = (
            f"names that the engine was made with: {', '.join(map(repr, self.slots)) or 'none'}"
        )
        rules: dict[str, Rule] = {
            "adapters": (lambda value: value.keys() <= self.slots.keys(), instead)
        }
        check_values(call, rules, {"adapters": adapters})
        for layout, params in self.stages:
            for name, adapter in adapters.items():
                check_slot(params, self.model.config, layout, self.slots[name], adapter)

    def write(
        self, pairs: Iterable[tuple[Tensor, Tensor]], adapters: Mapping[str, Adapter]
    ) -> None:
        """Copy the second tensor of each checked pair into the first, and write all adapters into
        their slots: the new ones, and also the others, since they may have been changed in
        place."""
        self.adapters = {**self.adapters, **adapters}
        # Outside it, tensors that were made in inference mode cannot be written.
        with torch.inference_mode():
            for target, new in pairs:
                target.copy_(new)
            for layout, params in self.stages:
                for slot, adapter in enumerate(self.adapters.values()):
                    write_slot(
                        params, self.model.config, layout, slot, adapter, shard=self.model.shard
                    )
        self.mark_seen()


def _tensors(params: DecoderParams) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in leaves_with_names(params) if isinstance(leaf, Tensor)}


def _once_each(
    call: str, pairs: Mapping[str, tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """The pairs, each tensor once: a tensor with several names, such as a tied head, has several
    pairs.

    Raises:
        RequestError: two names of one tensor have different values.
    """
    names: dict[tuple[Any, ...], str] = {}
    for name, (view, new) in pairs.items():
        place = view.device, view.data_ptr(), tuple(view.shape), view.stride()
        # Empty tensors are left out: they may share an address without being one tensor.
        if view.numel():
            first = names.setdefault(place, name)
        else:
            first = name
        _refuse_two_values(call, first, pairs[first][1], name, new, view.dtype)
    kept = {*names.values()}
    return [pair for name, pair in pairs.items() if name in kept]


def _refuse_two_values(
    call: str, first: str, value: Tensor, second: str, other: Tensor, dtype: torch.dtype
) -> None:
    """Raise RequestError unless the values for two names of one tensor are equal in its dtype; NaN
    equals NaN."""
    if value is other or first == second:
        return
    one, two = (x.to(value.device, dtype) for x in (value, other))
    if dtype.itemsize == 1:  # torch has no comparison of FP8 tensors
        one = one.float()
        two = two.float()
    if one.shape == two.shape and bool(
        torch.isclose(one, two, rtol=0, atol=0, equal_nan=True).all()
    ):
        return
    problem = f"{first!r} and {second!r}, which are one tensor of the model, with different values"
    raise RequestError(
        call, problem, "equal values, or one of the two names; untied, they need another model"
    )


def _like(place: PartView) -> Rule:
    """The rule for a tensor that replaces another: the checkpoint's shape; and the same dtype if
    either is in FP8, whose scales are separate tensors."""
    shape = place.part.stored_shape
    dtype = place.view.dtype

    def fits(value: Tensor) -> bool:
        scaled = torch.float8_e4m3fn in (dtype, value.dtype) or not value.is_floating_point()
        return shape == value.shape and (not scaled or dtype == value.dtype)

    return fits, f"{list(shape)}, {dtype}"


def make_weights(
    model: Model,
    split: Split,
    adapters: Mapping[str, Adapter],
    speculation: Speculation | None,
) -> Weights:
    """The parameters of the stages that run here, with the adapters in slots in their order."""
    layouts = split.layouts(model)
    params = stage_params(model, layouts, [*adapters.values()])
    if speculation is None or not layouts[0].first:
        drafts = None
    else:
        drafts = speculation.params
    stages = tuple(zip(layouts, params, strict=True))
    return Weights(model, stages, drafts, adapters)
