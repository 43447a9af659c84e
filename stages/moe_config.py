"""The mixture of experts of a config.json, as Qwen3-MoE writes it."""

import attrs

from weft.errors import ConfigError
from weft.stages.fields import Fields

MOE_FIELDS = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    }
)
"""The fields that an architecture with experts has beside the common ones."""


@attrs.frozen
class MoeConfig:
    """Experts in place of a feed-forward block: a router picks `top_k` of them for each token.

    Args:
        num_experts: in each sparse layer.
        top_k: experts a token.
        inner: the width between an expert's two products.
        renormalize: whether the weights of the chosen experts are divided by their sum.
        sparse_step: layer i has experts if `(i + 1) % sparse_step == 0` and it is not in `dense_layers`.
        dense_layers: layers with one feed-forward block of `intermediate_size` all the same.

    Raises:
        ConfigError: more experts a token than there are.
    """

    num_experts: int
    top_k: int
    inner: int
    renormalize: bool
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            seen = f"num_experts_per_tok={self.top_k} and num_experts={self.num_experts}"
            raise ConfigError("MoeConfig(…)", seen, "num_experts_per_tok is from 1 to num_experts")

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer, counted in the whole model, has experts.

        >>> [i for i in range(6) if MoeConfig(4, 2, 8, True, sparse_step=2, dense_layers=(3,)).is_sparse(i)]
        [1, 5]
        """
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


def parse_moe(fields: Fields) -> MoeConfig:
    """The experts of a whole config.json; missing fields have the defaults of transformers' Qwen3Moe (5.23).

    Raises:
        ConfigError: a value of the wrong type, more experts a token than there are, or two names of the number of
            experts that disagree.
    """
    numbers = {name: fields.raw[name] for name in ("num_experts", "num_local_experts") if name in fields.raw}
    if len(set(map(repr, numbers.values()))) > 1:
        raise fields.contradict(numbers, "keep num_experts alone")
    num_experts = fields.integer(next(iter(numbers), "num_experts"), 128)
    top_k = fields.integer("num_experts_per_tok", 8)
    if top_k > num_experts:
        values = {"num_experts_per_tok": top_k, "num_experts": num_experts}
        raise fields.contradict(values, "num_experts_per_tok is from 1 to num_experts")
    return MoeConfig(
        num_experts,
        top_k,
        fields.integer("moe_intermediate_size", 768),
        fields.flag("norm_topk_prob", False),
        fields.integer("decoder_sparse_step", 1),
        _dense_layers(fields),
    )


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    layers = fields.raw.get("mlp_only_layers")
    layers = [] if layers is None else layers
    if not isinstance(layers, list) or not all(type(one) is int and one >= 0 for one in layers):
        raise fields.refuse("mlp_only_layers", "mlp_only_layers is a list of layers, or null")
    return tuple(sorted(set(layers)))
