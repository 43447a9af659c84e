"""`Model`: a checkpoint, loaded as a value."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from tokenizers import Tokenizer
from torch import Tensor

from weft.arguments.checks import (
    Rule,
    check_values,
    kind_of,
    names_arguments,
    other_signature,
)
from weft.arguments.equivalents import STAGES
from weft.errors import ProgramError, RequestError
from weft.ops.attention.backends import AttentionBackend
from weft.settings import batch_invariant as invariant, is_batch_invariant
from weft.stages.checkpoints.chat import ChatTemplate, Messages, render_chat
from weft.stages.checkpoints.digests import Origin, digest_params
from weft.stages.checkpoints.tokenizer import encode, lacks_tokenizer, tokenizer_failures
from weft.stages.choices import (
    check_backend,
)
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import (
    OWN,
    Attend,
    ChangeLogits,
    DecoderStage,
    Layer,
    Normed,
    StageFunctions,
    Transform,
    check_functions,
    check_together,
    name_of,
    updated,
)
from weft.stages.custom.results import transformed
from weft.stages.custom.sown import SownNames
from weft.stages.decoder import decoder_stage
from weft.stages.drafters.beside import check_beside, readers_beside
from weft.stages.head import head
from weft.stages.layout import StageLayout, is_whole, split_layers
from weft.stages.params import DecoderParams, num_bytes
from weft.stages.shares import AXIS, TensorRanks, check_leaves, share_config
from weft.values.trees import OF_THIS_PROCESS

_RULES: dict[str, Rule] = {
    "token_ids": (
        lambda ids: (
            isinstance(ids, list | tuple) and all(hasattr(token, "__index__") for token in ids)
        ),
        "a list of ints; of a tensor, its .tolist()",
    ),
}

_TRANSFORM: Rule = (
    lambda f: f is None or (callable(f) and other_signature(f, 1) is None),
    "a function of a stage, which returns a stage",
)


@attrs.frozen(eq=False)
class Model:
    """A loaded checkpoint. Immutable, except that `Engine.update` writes its parameters in place.

    Args:
        config: the configuration of the whole model.
        params: the weights of the layers in `layout`.
        tokenizer: the checkpoint's tokenizer; None if it has none (then prompts are token ids).
        path: the folder or the file that the checkpoint was loaded from.
        layout: the part of the model that this object holds: all of it, or one stage.
        origin: digests of the checkpoint; None if the model was not loaded from one.
        functions: custom functions in its stages (`with_stages`).
        transforms: transforms of its stages, the innermost first.
        kv_dtype: the dtype of the KV cache; None: `dtype`.
        chat_template: the checkpoint's template, which turns chats into prompts; None if it has
            none.
        shard: this rank's share of each layer, `(index, number of ranks)` (`weft.stages.shares`).
    """

    config: ModelConfig
    params: DecoderParams
    tokenizer: Tokenizer | None
    path: Path = attrs.field(metadata=OF_THIS_PROCESS)
    layout: StageLayout = attrs.field(kw_only=True, metadata=OF_THIS_PROCESS)
    origin: Origin | None = attrs.field(default=None, kw_only=True, metadata=OF_THIS_PROCESS)
    functions: StageFunctions = attrs.field(default=OWN, kw_only=True)
    transforms: tuple[Transform, ...] = attrs.field(default=(), kw_only=True)
    kv_dtype: torch.dtype | None = attrs.field(default=None, kw_only=True)
    chat_template: ChatTemplate | None = attrs.field(default=None, kw_only=True)
    shard: tuple[int, int] = attrs.field(default=(0, 1), kw_only=True, metadata=OF_THIS_PROCESS)
    _sown_names: dict[int, SownNames] = attrs.field(  # by the number of stages
        factory=dict, init=False, repr=False, metadata=OF_THIS_PROCESS
    )

    @layout.default
    def _whole(self) -> StageLayout:
        return split_layers(self.config.num_layers, 1)[0]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.params.layers[0].input_layernorm.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.params.layers[0].input_layernorm.dtype

    @names_arguments(**STAGES)
    def with_stages(
        self,
        transform: Transform | None = None,
        *,
        attention: Callable[..., tuple[Tensor, Tensor]] | None = None,
        feed_forward: Callable[..., Tensor] | None = None,
        norm: Callable[..., tuple[Normed, Tensor]] | None = None,
        logits: ChangeLogits | None = None,
        layers: Mapping[int, Callable[[Layer], Layer]] | None = None,
        extras: Mapping[str, Tensor] | None = None,
        captures: Mapping[str, Tensor] | None = None,
        carries: Mapping[str, Tensor] | None = None,
        token_extras: Mapping[str, Tensor] | None = None,
        prefix_caching: str | None = None,
        attend: Attend | AttentionBackend | None = None,
        beside: Mapping[str, "Model"] | None = None,
        batch_invariant: bool = False,
        reduction_leaves: int = 1,
    ) -> "Model":
        """The same model with custom functions in its stages, for `generate`, `Engine`,
        `make_runner` and the laws. Parameters are shared.

        Each function must be pure and take tensors, as `graphify` requires. A batch may be padded
        at its end, in graphs and, on a GPU, in every mode; so `hidden[-1]` may not belong to a
        request. A function replaces the model's own. Changes of a layer, and transforms, are
        applied after those that the model already has.

        Args:
            transform: `f(stage) -> stage`, where a stage is `(params, state, batch, x) -> (state,
                y)`, as `decoder_stage` returns it. It is applied to each stage of any split.
            attention, attend, feed_forward, norm, logits: functions that replace the decoder's
                (`weft.stages.StageFunctions`).
            layers: a dict from a layer's index to `f(layer) -> layer`, where a layer is
                `(params, kv_pages, batch, tables, hidden) -> (hidden, kv_pages)`.
            extras: a dict from the name of each per-request input to its default value. The
                functions read it as `batch.per_token(batch.extras[name])` [num_tokens, ...], and
                `logits` as `extras[name]`. A request sets its value with `engine.add(...,
                extras={name: value})`.
            beside: a dict of whole models, such as a smaller one, that read the same tokens in the
                same steps and graphs, with KV pages of their own. `logits` reads their logits as
                `extras[name]` [n, vocab_size]. Their parameters are closed over. Every rank of a
                pipeline holds them; the last one runs them.
            captures: a dict from the name of each value that the functions capture per token
                (`weft.stages.sow`) to an example of it, such as `{"hidden":
                torch.zeros(hidden_size)}`.
            carries: a dict from the name of each value that the functions carry from token to token
                (`weft.stages.carry`) to its value before a request's first token. The functions
                read it in `batch.carried`, one for each request.
            token_extras: like `extras`, for each token of a prompt. The functions read it in
                `batch.token_extras` [num_tokens, ...]. A request gives [tokens of its prompt, ...]
                in the same `engine.add(..., extras=...)`; generated tokens have the default.
            prefix_caching: `"full"`, `"recompute"`, `"snapshot"` or `"none"`: how to treat tokens
                that are in the prefix cache. They need not be computed, and are then neither
                captured nor carried through (`weft.stages.StageFunctions`). None: the model's own
                setting; by default, requests of a model with captures or carries share no
                prefixes.
            batch_invariant: run in `weft.batch_invariant()`, as a model from `weft.load` with the
                same argument does. False: as this model does. Custom functions have to be batch
                invariant themselves.
            reduction_leaves: as `weft.load` takes it; 1: as this model does.

        Raises:
            ConfigError: the model's sums cannot be cut into that many leaves.
            ProgramError: one of them is not a function, the model has no such layer, or captures or
                carries lack tokens under that `prefix_caching`.

        >>> def doubled(layer):
        ...     def run(params, kv_pages, batch, tables, hidden):
        ...         hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
        ...         return 2 * hidden, kv_pages
        ...     return run
        >>> import weft
        >>> model = weft.load("demo", "cpu")
        >>> steered = model.with_stages(layers={1: doubled}, logits=lambda logits, rows, extras: logits / 2)
        """
        # Without the values: functions print as addresses, which tell a reader nothing.
        call = "model.with_stages(...)"
        rules: dict[str, Rule] = {
            "transform": _TRANSFORM,
            "batch_invariant": (bool, "True or False"),
        }
        check_values(
            call, rules, {"transform": transform, "batch_invariant": batch_invariant}, ProgramError
        )
        callables: dict[str, Any] = {
            "attention": attention,
            "feed_forward": feed_forward,
            "norm": norm,
            "logits": logits,
        }
        callables |= {"attend": attend}
        tensors: dict[str, Any] = {
            "extras": extras or {},
            "captures": captures or {},
            "carries": carries or {},
        }
        tensors |= {"token_extras": token_extras or {}, "beside": beside or {}}
        # In two steps: what is wrong with the arguments alone is said of the arguments.
        new = StageFunctions(
            **callables, layers=layers or {}, **tensors, prefix_caching=prefix_caching
        )
        check_functions(call, new, self.config.num_layers)
        exact = attrs.evolve(
            new, batch_invariant=batch_invariant, reduction_leaves=reduction_leaves
        )
        functions = updated(self.functions, exact)
        # Again: the arguments may be valid alone, but not beside what the model already has.
        check_functions(call, functions, self.config.num_layers)
        check_leaves(call, self.config, functions.reduction_leaves, self.shard[1])
        check_beside(call, self, functions.beside)
        for model, attend in (
            (self, functions.attend),
            *((m, m.functions.attend) for m in functions.beside.values()),
        ):
            if isinstance(attend, AttentionBackend):
                backend_args = (
                    model.config,
                    model.device,
                    model.dtype,
                    model.kv_dtype,
                    functions.batch_invariant,
                )
                check_backend(attend, *backend_args, call=call)
        check_together(call, functions)
        more = () if transform is None else (transform,)
        return attrs.evolve(self, functions=functions, transforms=(*self.transforms, *more))

    def stage(
        self,
        layout: StageLayout,
        *,
        keep_logits: bool = False,
        num_logprobs: int = 0,
        num_drafts: int = 0,
    ) -> DecoderStage:
        """The stage of the layers in `layout`: a pure function that donates its state.

        Args:
            layout, keep_logits, num_logprobs, num_drafts: as `decoder_stage` takes them.

        Raises:
            ProgramError: when called, if a transformed stage does not return what a stage returns.
        """
        names = {f.name for f in attrs.fields(StageFunctions)} - {
            "extras",
            "prefix_caching",
            "beside",
        }
        stage_options = {name: getattr(self.functions, name) for name in names}
        stage_options["token_extras"] = {
            # Once for each stage, and not in each step, where a transfer would end a capture.
            name: x.to(self.device)
            for name, x in self.functions.token_extras.items()
        }
        options: dict[str, Any] = {
            "keep_logits": keep_logits,
            "num_logprobs": num_logprobs,
            "num_drafts": num_drafts,
        }
        # Only the last stage computes logits, which are all that other models are read for.
        if layout.last and self.functions.beside:
            models = {
                name: (one.config, one.params, one.functions)
                for name, one in self.functions.beside.items()
            }
            stage_options["beside"] = readers_beside(models, self.device)
        # One object for all stages of a split: a name that no stage sows is an error, and a stage
        # alone cannot tell.
        stage_options["sown_names"] = self._sown_names.setdefault(
            layout.num_stages, SownNames(layout.num_stages)
        )
        stage_options["device"] = self.device
        stage_options["ranks"] = (
            None if self.shard[1] == 1 else TensorRanks(AXIS, self.config.vocab_size)
        )
        stage = decoder_stage(rank_config(self), layout, **options, **stage_options)
        for transform in self.transforms:
            stage = transformed(stage, transform, layout)
        return stage

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., vocab_size] of hidden states [..., hidden_size] after any layer, by the
        model's final norm and head. For an early layer, this is a logit lens (nostalgebraist,
        2020).

        Raises:
            ProgramError: hidden states of another size; or this is a stage without a head, or a
                rank's share.
        """
        call = f"model.logits(hidden: {kind_of(hidden)})"
        size = self.config.hidden_size
        # A share of the head has the logits of a part of the vocabulary only.
        if self.params.norm is None or self.shard[1] > 1:
            instead = "the whole model's: weft.load(path).logits(hidden)"
            part = "a stage without a head"
            kind = part if self.params.norm is None else "a part of the head"
            raise ProgramError(call, f"{kind}, {self!r}", instead)
        if not isinstance(cast(Any, hidden), Tensor) or hidden.shape[-1:] != (size,):
            description = (
                list(hidden.shape) if isinstance(cast(Any, hidden), Tensor) else kind_of(hidden)
            )
            raise ProgramError(call, f"hidden states {description}", f"a tensor [..., {size}]")
        flat = hidden.reshape(-1, size).to(self.device, self.dtype)
        with invariant(self.functions.batch_invariant or is_batch_invariant()):
            # With cut sums, the head's bits do not depend on how many ranks share it.
            is_cut = self.functions.reduction_leaves > 1
            return head(self.config, self.params, flat, leaves=int(is_cut)).reshape(
                *hidden.shape[:-1], -1
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds.

        Raises:
            RequestError: the checkpoint has no tokenizer, or `text` is not a string.
        """
        return encode(self.tokenizer, text, f"model.encode({text!r:.60})", self.path)

    def encode_chat(
        self, messages: Messages, /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a chat, rendered by the checkpoint's chat template, which also writes the
        special tokens.

        Args:
            messages: dicts, each with a `role` and a `content`.
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: other variables of the template, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: the checkpoint has no template or no tokenizer, or the template refuses
                the messages.
        """
        call = "model.encode_chat(messages)"
        if self.chat_template is None or self.tokenizer is None:
            lacks_template = f"{self.path} holds no chat template"
            if self.chat_template is None:
                problem = lacks_template
            else:
                problem = lacks_tokenizer(self.path)
            instead = (
                "a checkpoint of a chat model; or attrs.evolve(model,"
                " chat_template=weft.stages.ChatTemplate(...))"
            )
            raise RequestError(call, problem, instead)
        context = {"add_generation_prompt": add_generation_prompt, **variables}
        text = render_chat(self.chat_template, call, messages, context)
        # The template has written the special tokens.
        return encode(self.tokenizer, text, call, self.path, special=False)

    def decode(self, token_ids: list[int]) -> str | None:
        """The text of token ids, without special tokens; None if the checkpoint has no tokenizer.

        Raises:
            RequestError: `token_ids` is not a list of token ids.
        """
        call = "model.decode(token_ids)"
        instead = f"ids of its tokens, or another {self.path}"
        check_values(call, _RULES, {"token_ids": token_ids})
        if self.tokenizer is None:
            return None
        with tokenizer_failures(RequestError, call, "the tokenizer failed", instead):
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def __repr__(self) -> str:
        size = num_bytes(self.params) / 2**20
        if self.layout.num_stages == 1:
            part = ""
        else:
            part = f", stage {self.layout.index} of {self.layout.num_stages}"
        part += "" if self.shard[1] == 1 else f", share {self.shard[0]} of {self.shard[1]}"
        layers = len(self.layout.layers)
        return (
            f"<Model {self.config.architecture}{part}, {layers} layers, {size:.1f} MiB on"
            f" {self.device}>"
        )

    def _repr_html_(self) -> str:
        return self.params.table(repr(self))._repr_html_()


def describe_weights(model: Model) -> str:
    """The dtype and a digest of the weights, which the ranks of a pipeline compare.

    For a loaded model, the digest covers samples of the whole checkpoint, and the text says so
    if any of 4 values sampled from each tensor has changed since loading. Without a checkpoint,
    a whole model has a digest of those sampled values; a share, a digest of its norms, which
    are the same on all ranks; and a stage has none.
    """
    if model.origin is None and model.layout.num_stages > 1:
        return f"{model.dtype}, of no checkpoint"
    if model.origin is None:
        if is_whole(model.layout, model.shard):
            digest = digest_params(model.params)
        else:
            norms = [layer.input_layernorm for layer in model.params.layers]
            digest = digest_params((norms, model.params.norm))
        return f"{model.dtype}, {digest}"
    return f"{model.dtype}, {model.origin.describe(model.params)}"


def rank_config(model: Model) -> ModelConfig:
    """The configuration of this rank's share."""
    if model.shard[1] == 1:
        return model.config
    return share_config(model.config, model.shard[1])


def cache_dtype(model: Model) -> torch.dtype:
    """The dtype of the KV cache."""
    return model.kv_dtype or model.dtype


def model_facts(model: Model) -> dict[str, str]:
    """The facts on which the ranks of a pipeline must agree: the configuration, the weights,
    the stage functions and the dtype of the KV cache."""
    fields = attrs.asdict(model.config, recurse=False)
    stages = ", ".join((f"{model.functions}", *map(name_of, model.transforms)))
    return {
        **{f"config.{name}": str(value) for name, value in fields.items()},
        "weights": describe_weights(model),
        **{
            f"beside {name}": describe_weights(other)
            for name, other in sorted(model.functions.beside.items())
        },
        "stages": stages,
        "kv_dtype": f"{cache_dtype(model)}",
    }
