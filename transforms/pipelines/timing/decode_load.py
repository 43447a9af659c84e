"""`DecodeLoad`: the work of a decode step in each stage of a pipeline, and the costs of its
effects."""

import functools
from typing import Any

import attrs
import torch

from weft.display.quantities import byte_size
from weft.meshes.collectives import AllGather, AllReduce, AllToAll, Collective
from weft.stages.config import ModelConfig
from weft.stages.layout import BYTES_PER_LOGIT, balance, layer_weights, split_layers
from weft.stages.shares import share_config
from weft.transforms.pipelines.timing.costs import Costs, all_reduce_ways, effect_seconds
from weft.transforms.pipelines.timing.hardware import KERNELS_PER_LAYER, MEMORY_SHARE, Machine
from weft.values.schema import Schema, TensorSchema

# A generous size for the graphs of one rank: the largest in `proofs/results/` take 463 MB.
_GRAPHS_BYTES = 500_000_000
# The bytes of a request's token and logprob (`weft.batches.outputs.Output`)
_OUTPUT_BYTES = 8 + 4


@attrs.frozen
class MemoryNeed:
    """The bytes that a rank of one stage holds.

    Args:
        weights: the bytes of its share of the stage's layers, embedding and head.
        kv: the bytes of the keys and values of all requests.
        graphs: the bytes of its graphs.
    """

    weights: int
    kv: int
    graphs: int = _GRAPHS_BYTES

    @property
    def total(self) -> float:
        """The least memory of a device that can run it: an engine fills only `MEMORY_SHARE` of what
        the weights leave."""
        return self.weights + (self.kv + self.graphs) / MEMORY_SHARE

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv, "graphs": self.graphs}
        return ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items())


@attrs.frozen
class DecodeLoad:
    """The bytes that a decode step reads on one rank, and the seconds of its stages: the bytes
    divided by the bandwidth, plus the time of the kernels, plus the collectives of the ranks that
    share each layer.

    Args:
        context: the number of tokens before the generated one.
        num_shards: the number of ranks that share each layer. The ranks of a stage have successive
            numbers.
    """

    config: ModelConfig
    num_stages: int
    context: int
    machine: Machine
    num_shards: int = 1

    @functools.cached_property
    def shard_config(self) -> ModelConfig:
        """The configuration of one rank's share."""
        if self.num_shards == 1:
            return self.config
        return share_config(self.config, self.num_shards)

    @property
    def own_logits(self) -> int:
        """The number of a request's logits that one rank computes."""
        return -(-self.config.vocab_size // self.num_shards)

    @property
    def kernels(self) -> float:
        """The seconds of a layer's kernels in addition to their memory reads."""
        return KERNELS_PER_LAYER * self.machine.kernel

    def ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks that share a stage."""
        return tuple(range(stage * self.num_shards, (stage + 1) * self.num_shards))

    def all_reduce(self, size: int) -> float:
        """The seconds to sum, over the ranks that share a block, what they add to the hidden states
        of `size` tokens."""
        return self._longest(AllReduce, size, self.config.hidden_size)

    def all_reduce_way(self, size: int) -> str:
        """The fastest way to compute that sum, for the stage in which it takes the longest."""
        effect = self._slowest(AllReduce, size, self.config.hidden_size)
        assert isinstance(effect, AllReduce)
        ways = all_reduce_ways(self._link_costs, effect)
        return min(ways, key=ways.__getitem__)

    def sampling(self, size: int) -> float:
        """The seconds that the ranks of the last stage need to sample for `size` requests: they
        exchange logits, so that each rank has all logits of its rows, sample, and gather the
        tokens."""
        rows = -(-size // self.num_shards)
        sampled = rows * self.config.vocab_size * BYTES_PER_LOGIT / self.machine.bandwidth
        exchange = self._longest(AllToAll, rows * self.num_shards, self.own_logits)
        if size > 1:
            tokens = self._longest(AllGather, rows, _OUTPUT_BYTES, dtype=torch.uint8)
        else:
            tokens = 0.0
        return sampled + exchange + tokens

    def _longest(
        self, kind: type[Collective], *dims: int, dtype: torch.dtype | None = None
    ) -> float:
        """The seconds of a collective in the stage in which it takes the longest."""
        if self.num_shards == 1:
            return 0.0
        return effect_seconds(self._link_costs, self._slowest(kind, *dims, dtype=dtype))

    def _slowest(
        self, kind: type[Collective], *dims: int, dtype: torch.dtype | None = None
    ) -> Collective:
        """The collective for the ranks of the stage in which it takes the longest."""
        schema = Schema((TensorSchema("x", dims, dtype or self.config.dtype),))
        # Stages whose ranks are spread alike over nodes cost the same: one of each kind is enough.
        groups = {
            self.machine.per_node(ranks): ranks for ranks in map(self.ranks, range(self.num_stages))
        }
        return max(
            (kind(ranks, schema=schema) for ranks in groups.values()),
            key=functools.partial(effect_seconds, self._link_costs),
        )

    @functools.cached_property
    def _link_costs(self) -> Costs:
        """The costs of exchanges between the ranks of a stage."""
        machine = self.machine
        return Costs(
            latency=machine.latency_of,
            bytes_per_second=machine.link_of,
            collective=machine.collective,
            gpus_per_node=machine.gpus_per_node,
        )

    def transfer(self, size: int) -> float:
        """The seconds of the slowest message of `size` requests from one stage to the next; 0 if
        there is only one stage."""
        message = size * self.bytes()["message"]
        machine = self.machine
        pairs = (self._farthest((stage, stage + 1)) for stage in range(self.num_stages - 1))
        return max(
            (machine.latency_of(pair) + message / machine.link_of(pair) for pair in pairs),
            default=0.0,
        )

    def _farthest(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of two stages in one lane: preferably a lane in which they are in two nodes."""
        lanes = list(zip(*map(self.ranks, stages), strict=True))
        # False sorts first: a lane that crosses nodes is the slow one.
        return min(lanes, key=self.machine.is_near)

    def bytes(self) -> dict[str, int]:
        """The bytes of these items on one rank, in the dtype that the model declares.

        - `layer`: the weights of the largest layer, with all its experts
        - `head`: the final norm and the head's matrix
        - `embedding`: a token's row of the embedding
        - `kv`: a token's keys and values in one layer
        - `message`: a token in the message that one stage sends to the next
        """
        config = self.shard_config
        row = self.config.hidden_size * self.config.dtype.itemsize
        return {
            "layer": max(weights.fixed + weights.experts for weights in layer_weights(config)),
            "head": row + self.own_logits * row,
            "embedding": row,
            "kv": 2 * config.num_kv_heads * config.head_dim * config.dtype.itemsize,
            "message": row,
        }

    def memory(self, num_requests: int, size: int) -> tuple[MemoryNeed, ...]:
        """The bytes that a rank of each stage holds, in the best split for a cohort of `size`
        requests. The KV cache holds `num_requests` requests with their context and a new token."""
        sizes = self.bytes()
        layers = layer_weights(self.shard_config)
        tied = self.config.tie_word_embeddings
        needs = []
        for stage in self.splits(size)["balanced"]:
            start = stage["start"]
            stop = stage["stop"]
            weights = sum(layer.fixed + layer.experts for layer in layers[start:stop])
            is_last = stop == len(layers)
            weights += sizes["head"] * is_last
            # A tied embedding is the head's matrix: one copy if both are on the same stage.
            weights += (
                self.own_logits * sizes["embedding"] * (start == 0 and not (is_last and tied))
            )
            needs.append(
                MemoryNeed(
                    weights, num_requests * (self.context + 1) * sizes["kv"] * (stop - start)
                )
            )
        return tuple(needs)

    def splits(self, size: int) -> dict[str, list[dict[str, Any]]]:
        """The best split for a cohort of `size` requests (`balanced`), and the split into equal
        numbers of layers (`even`): for each stage, its layers and seconds."""
        sizes = self.bytes()
        per_second = self.machine.bandwidth
        kv = size * self.context * sizes["kv"]
        shared = self.all_reduce(size)
        # A layer has two all-reduces: after the attention and after the MLP or experts.
        besides = self.kernels + 2 * shared
        layers = [
            (weights.read(size) + kv) / per_second + besides
            for weights in layer_weights(self.shard_config)
        ]
        first = size * sizes["embedding"] / per_second + shared
        last = sizes["head"] / per_second + self.sampling(size)

        def seconds(start: int, stop: int) -> float:
            return sum(layers[start:stop]) + first * (start == 0) + last * (stop == len(layers))

        layouts = {
            "balanced": balance(layers, self.num_stages, first=first, last=last),
            "even": split_layers(len(layers), self.num_stages),
        }
        return {
            name: [
                {"start": s.start, "stop": s.stop, "seconds": seconds(s.start, s.stop)}
                for s in split
            ]
            for name, split in layouts.items()
        }

    def costs(self, size: int) -> Costs:
        """The costs of a step of a cohort of `size` requests, in its best split. The ranks of these
        costs are the stages of one lane. Collectives are part of the stages, because all lanes
        reach them at the same time."""
        return Costs(
            [stage["seconds"] for stage in self.splits(size)["balanced"]],
            latency=lambda stages: self.machine.latency_of(self._farthest(stages)),
            bytes_per_second=lambda stages: self.machine.link_of(self._farthest(stages)),
            message_bytes=size * self.bytes()["message"],
            output_bytes=size * _OUTPUT_BYTES,
        )
