"""The parameters of an engine: changed in place, and found out where they were."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments import kind_of
from weft.errors import RequestError
from weft.stages.adapters import Adapter, check_slot, write_slot
from weft.stages.checkpoint import digest_params, list_some, places, tensor_shapes
from weft.stages.layout import StageLayout, split_layers
from weft.stages.model import Model
from weft.stages.params import DecoderParams
from weft.torchapi import changes_of
from weft.trees import leaves_with_names, tree_leaves

Params = DecoderParams | Mapping[str, Tensor]
"""Parameters as `weft.load` returns them in a model; or tensors by transformers' names, as in a `state_dict()`."""


@attrs.define(eq=False)
class Weights:
    """What the steps of an engine read, and change never.

    Args:
        model: whose parameters the stages share.
        stages: of each stage that runs here, its layers and its parameters, with slots for adapters.
        drafts: the parameters of a draft model, or None.
        slots: of adapters, by name.
    """

    model: Model
    stages: Sequence[tuple[StageLayout, DecoderParams]]
    drafts: Any
    slots: Mapping[str, int]
    _tracked: tuple[Tensor, ...] = attrs.field(init=False, repr=False)
    _seen: int = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        leaves = tree_leaves(([params for _, params in self.stages], self.drafts))
        self._tracked = tuple(x for x in leaves if isinstance(x, Tensor) and not x.is_inference())
        self.look()

    def look(self) -> None:
        """Take the tensors to be as they should be."""
        self._seen = changes_of(self._tracked)

    @property
    def are_changed(self) -> bool:
        """Whether a tensor was changed in place since the last look, as far as torch counts it (`changes_of`)."""
        return changes_of(self._tracked) != self._seen

    def pairs(self, call: str, given: Any) -> list[tuple[Tensor, Tensor]]:
        """Each tensor that is given, behind the part of the parameters that it replaces.

        Raises:
            RequestError: no parameters, or of another model.
        """
        if isinstance(given, DecoderParams):
            own, other = ([pair for pair in leaves_with_names(p) if isinstance(pair[1], Tensor)]
                          for p in (self.model.params, given))  # fmt: skip
            if [name for name, _ in own] != [name for name, _ in other]:
                raise RequestError(call, "parameters of another structure", f"those of {self.model!r}")
            return [_fitting(call, name, x, y) for (name, x), (_, y) in zip(own, other, strict=True)]
        if not isinstance(given, Mapping) or not all(isinstance(x, Tensor) for x in given.values()):
            instead = "params of a weft.load(...), a state_dict() by transformers' names, or None: changed in place"
            raise RequestError(call, f"params is {kind_of(given)}", instead)
        here = places(self.model.params, self.model.config, self.model.layout)
        (whole,) = split_layers(self.model.config.num_layers, 1)
        known = {*here, *tensor_shapes(self.model.config, whole)}
        if extra := [str(name) for name in given if name not in known]:
            instead = f"names as {next(iter(here))!r}, of the model's own architecture"
            raise RequestError(call, f"{list_some(extra)}, which the model does not have", instead)
        return [_fitting(call, name, here[name], x) for name, x in given.items() if name in here]

    def digest(self, given: Any) -> str:
        """What all ranks must say alike of parameters that are given: a digest where these are the whole model's."""
        if given is None:
            return "what was changed in place"
        (whole,) = split_layers(self.model.config.num_layers, 1)
        if not isinstance(given, Mapping) or not given.keys() >= tensor_shapes(self.model.config, whole).keys():
            return "a part of the model"
        return digest_params([given[name] for name in sorted(given)])

    def check_adapters(self, call: str, adapters: Any) -> None:
        """Refuse adapters that have no slot here.

        Raises:
            RequestError: an adapter that the engine does not have, or that does not fit its slots.
        """
        if not isinstance(adapters, Mapping) or not all(isinstance(each, Adapter) for each in adapters.values()):
            raise RequestError(call, f"adapters={adapters!r:.200}", "{name: weft.load_adapter(model, folder)}, or None")
        if unknown := [name for name in adapters if name not in self.slots]:
            known = ", ".join(map(repr, self.slots)) or "none"
            raise RequestError(call, f"an adapter {unknown[0]!r}", f"one that the engine was made with: {known}")
        for layout, params in self.stages:
            for name, adapter in adapters.items():
                check_slot(params, self.model.config, layout, self.slots[name], adapter)

    def write(self, pairs: Iterable[tuple[Tensor, Tensor]], adapters: Mapping[str, Adapter]) -> None:
        """Write tensors over those in front of them, and adapters into their slots, all of them checked."""
        with torch.inference_mode():  # in which tensors may be written that were made in it
            for own, new in pairs:
                own.copy_(new)
            for layout, params in self.stages:
                for name, adapter in adapters.items():
                    write_slot(params, self.model.config, layout, self.slots[name], adapter)
        self.look()


def _fitting(call: str, name: str, own: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The two, of one shape; and where one of them is in FP8, whose scales are other tensors, of one dtype."""
    scaled = torch.float8_e4m3fn in (own.dtype, given.dtype) or not given.is_floating_point()
    if own.shape != given.shape or (scaled and own.dtype != given.dtype):
        seen = f"{name} {list(given.shape)}, {given.dtype}"
        raise RequestError(call, seen, f"{list(own.shape)}, {own.dtype}")
    return own, given.detach()
