"""`verify`: recompute certified completions, and compare them bit for bit."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from weft.arguments.checks import Rule, check_values
from weft.display.quantities import counted
from weft.display.tables import Table, Tabled
from weft.errors import RequestError
from weft.stages.adapters.adapter import Adapter
from weft.stages.custom.functions import default_page_size
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.certificates import Certificate, certified_facts
from weft.transforms.engine.evaluation.facts import digest, digest_tokenizer, facts_of
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local


@attrs.frozen(repr=False)
class Verification(Tabled):
    """A recomputed completion, beside its certificate.

    Args:
        certificate: the certificate of the original completion.
        token_ids, logprobs, finish_reason: the recomputed completion. It stops at the first token
            that differs, with the reason `abort`, and has at most one token more than were
            certified.
        here: the facts of this process, by the names of `Certificate.facts`.
    """

    certificate: Certificate
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    here: Mapping[str, str]

    @property
    def first_difference(self) -> int | None:
        """The index of the first token that differs, or whose logprob differs in any bit; None:
        none does."""
        # As hex, in which every bit counts (0.0 differs from -0.0) and NaN equals NaN.
        computed, certified = (
            [*zip(one.token_ids, map(float.hex, one.logprobs), strict=True)]
            for one in (self, self.certificate)
        )
        same = next(
            (i for i, (a, b) in enumerate(zip(computed, certified, strict=False)) if a != b), None
        )
        if same is None and len(computed) != len(certified):
            return min(len(computed), len(certified))
        return same

    @property
    def equal(self) -> bool:
        """Whether the completion and the weights are equal, bit for bit."""
        same = (
            self.first_difference is None and self.finish_reason == self.certificate.finish_reason
        )
        return same and "weights" not in self.other_facts

    @property
    def other_facts(self) -> dict[str, tuple[str, str]]:
        """The facts that differ, each as a pair of the value here and the certified one."""
        certified = certified_facts(self.certificate)
        names = sorted({*certified, *self.here})
        pairs = {name: (self.here.get(name, "none"), certified.get(name, "none")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def result(self) -> str:
        """`equal`, `equal, with other weights`, or a description of the first difference."""
        place = self.first_difference
        certificate = self.certificate
        if place is None and self.finish_reason != certificate.finish_reason:
            return f"ends with {self.finish_reason!r}, certified {certificate.finish_reason!r}"
        if place is None:
            if self.equal:
                return "equal"
            return "equal, with other weights"
        computed = self.token_ids[place : place + 1]
        other = certificate.token_ids[place : place + 1]
        if computed and computed == other:
            return (
                f"token {place}: logprob {self.logprobs[place]!r}, certified"
                f" {certificate.logprobs[place]!r}"
            )
        here, certified = (f"{ids[0]}" if ids else "none" for ids in (computed, other))
        return f"token {place}: {here}, certified {certified}"

    def _table(self) -> Table:
        """A table of the result, and of the facts that differ."""
        rows = [
            {
                "": "completion",
                "here": self.result,
                "certified": counted(len(self.certificate.token_ids), "token"),
            }
        ]
        rows += [
            {"": name, "here": here, "certified": other}
            for name, (here, other) in self.other_facts.items()
        ]
        return Table.of(rows)


_RULES: dict[str, Rule] = {
    "certificates": (
        lambda value: (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(one, Certificate) for one in value)
        ),
        "a certificate, or a list of them: weft.Certificate.load_all(path)",
    ),
    "adapters": (
        lambda value: (
            isinstance(value, list | tuple) and all(isinstance(one, Adapter) for one in value)
        ),
        "a list of weft.load_adapter(model, folder)",
    ),
}


def verify(
    certificates: Certificate | Sequence[Certificate],
    model: Model,
    *,
    pipeline: int = 1,
    tensor: int = 1,
    graph: str = "full",
    transport: Transport | None = None,
    adapters: Sequence[Adapter] = (),
    speculation: Speculation | None = None,
    limits: EngineLimits | None = None,
) -> list[Verification]:
    """Recompute certified completions, all in one batch, in any split and mode, and compare them
    bit for bit. Each one ends after its first difference, or one token after the certified ones.

    Args:
        certificates: of one or several completions, by models of the same weights.
        model: from `weft.load`; it is made batch invariant. `tensor` may differ from the certified
            run's if the model has the same `reduction_leaves`.
        pipeline, tensor, graph, transport, speculation, limits: as `Engine` takes them. Every rank
            makes the same call.
        adapters: the LoRA adapters that the certificates name by their digests.

    Returns:
        A verification for each certificate, in order.

    Raises:
        RequestError: this model cannot run a certificate's request, or the adapter of a certificate
            is missing.

    >>> import weft
    >>> model = weft.load("demo", "cpu", batch_invariant=True)
    >>> several = weft.generate(model, ["The function returns", "A list"], max_tokens=8, temperature=1.0)
    >>> [verification] = verify(several[1].certificate(), model, pipeline=2, graph="none")
    >>> verification.result
    'equal'
    """
    call = "weft.verify(certificates, model)"
    certificate_list = [certificates] if isinstance(certificates, Certificate) else certificates
    check_values(call, _RULES, {"certificates": certificate_list, "adapters": adapters})
    # Otherwise the bits would depend on the batch, the split and the mode.
    model = model.with_stages(batch_invariant=True)
    carrier = transport or Local()
    named = {digest(adapter.deltas): adapter for adapter in adapters}
    if missing := [
        one.adapter
        for one in certificate_list
        if one.adapter is not None and one.adapter not in named
    ]:
        problem = (
            f"a completion of the adapter {missing[0]}, and adapters {', '.join(named) or 'none'}"
        )
        raise RequestError(call, problem, "adapters=[weft.load_adapter(model, folder)] of that one")
    longest = min(
        max(len(one.prompt) + _most_tokens(one) for one in certificate_list),
        model.config.max_position_embeddings,
    )
    limits = limits or EngineLimits(
        max_num_reqs=min(len(certificate_list), 64), page_size=default_page_size(model.functions)
    )
    if limits.max_model_len is None:
        limits = attrs.evolve(limits, max_model_len=longest)
    options: dict[str, Any] = {
        "transport": transport,
        "speculation": speculation,
        "adapters": named,
    }
    # The engine's seed decides nothing: every certificate has a seed.
    engine = Engine(model, limits, pipeline=pipeline, tensor=tensor, graph=graph, seed=0, **options)
    for index, one in enumerate(certificate_list):
        engine.add(
            [*one.prompt],
            one.sampling,
            max_tokens=_most_tokens(one),
            id=str(index),
            adapter=one.adapter,
        )
    verifications = _run(engine, certificate_list)
    weights, program, versions = facts_of(model, carrier)
    here = {**versions, "weights": weights, "program": program}
    for place, one in enumerate(certificate_list):
        tokenizer = digest_tokenizer(model, one.sampling)
        facts = here if tokenizer is None else {**here, "tokenizer": tokenizer}
        verifications[place] = attrs.evolve(verifications[place], here=facts)
    return verifications


def _most_tokens(one: Certificate) -> int:
    """The tokens to generate for a comparison: one more than were certified, to see whether the
    completion ends there."""
    return min(one.max_tokens, len(one.token_ids) + 1)


def _run(engine: Engine, certificates: Sequence[Certificate]) -> list[Verification]:
    """Run an engine's requests 0, 1, ..., and end each after its first difference."""
    verifications: dict[int, Verification] = {}
    for output in engine:
        index = int(output.id)
        state = output.track
        reason = output.finish_reason
        if reason is None and _differs(certificates[index], output):
            # Later tokens depend on the one that differs, so that they prove nothing.
            reason = "abort"
            engine.abort(output.id)
        if reason is not None:
            verifications[index] = Verification(
                certificates[index], tuple(state.token_ids), tuple(state.logprobs), reason, {}
            )
    return [verifications[index] for index in range(len(certificates))]


def _differs(one: Certificate, output: RequestOutput) -> bool:
    """Whether one of the new tokens differs from the certified ones."""
    state = output.track
    new = slice(len(state.token_ids) - len(output.token_ids), len(state.token_ids))
    here, certified = (
        ([*x.token_ids[new]], [*map(float.hex, x.logprobs[new])]) for x in (state, one)
    )
    return here != certified
