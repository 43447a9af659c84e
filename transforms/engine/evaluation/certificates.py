"""Certificates of completions: what fixes the bits of one, so that anybody can compute it again, and see."""

import json
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from weft.arguments.checks import Rule, check_values, is_int, is_number
from weft.arguments.json_text import Fields, read_json_lines
from weft.batch import EMBEDDED
from weft.display.quantities import counted
from weft.display.tables import Table, Tabled
from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.stages.adapters import Adapter
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.facts import digest, facts_of, seen_of
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.requests import Request
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local

FORMAT = "weft certificate 1"
_UNSAID = "logprobs", "prompt_logprobs", "n"
"""Fields of sampling parameters that change no token, or that are those of one completion among several."""


@attrs.frozen(kw_only=True, repr=False)
class Certificate(Tabled):
    """A completion, and all that its bits depend on, if the model is batch invariant. It prints as a table, and `save`
    and `load` keep it as JSON.

    Args:
        prompt: the token ids.
        max_tokens: the most tokens to generate.
        sampling: how tokens were chosen, with the completion's own seed.
        adapter: a digest of the matrices of its LoRA adapter; None: the model alone.
        token_ids, logprobs, finish_reason: the completion.
        weights: a digest of all weights, byte for byte.
        program: a digest of the configuration, and of functions of one's own in the stages: of their compiled code, and
            of the values that they close over and read, tensors among them. It names the types of values that have no
            digest, such as a lock. Operators that one registers with torch, and extensions in C, are not in it.
        versions: of weft (with a digest of its source), Python, torch and triton; and the device.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    adapter: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weights: str
    program: str
    versions: Mapping[str, str]

    @property
    def facts(self) -> dict[str, str]:
        """All but the request on which the bits depend, by name."""
        return {**self.versions, "weights": self.weights, "program": self.program}

    def text(self) -> str:
        """The certificate as one line of JSON."""
        own = attrs.asdict(self, recurse=False)
        fields = attrs.fields(SamplingParams)
        given = {f.name: getattr(self.sampling, f.name) for f in fields}
        default = SamplingParams(temperature=0.0)
        own["sampling"] = {name: x for name, x in given.items() if x != getattr(default, name) or name == "seed"}
        return json.dumps({"format": FORMAT, **own})

    def save(self, path: Path | str) -> None:
        """Write it to a file."""
        Path(path).write_text(self.text() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Certificate":
        """Read it from a file that `save` wrote.

        Raises:
            ConfigError, RequestError: the file cannot be read, or is not one certificate.
        """
        call = f"weft.Certificate.load({str(path)!r})"
        found, *others = read_certificates(Path(path), call)
        if others:
            raise RequestError(
                call, f"{1 + len(others)} certificates", "a file of one; or weft verify, which takes several"
            )
        return found

    @classmethod
    def from_json(cls, raw: Any, call: str, source: str) -> Self:
        """The certificate in a JSON value.

        Args:
            call, source: the call as written, and where the object came from, for errors.

        Raises:
            ConfigError: a field is missing, or is not what it has to be.
        """
        fields = Fields(raw if isinstance(raw, Mapping) else {}, call, source)
        fields.check(fields.raw.get("format") == FORMAT, "format", f"{_FORM}: format={FORMAT!r}")
        known = {"format", *(field.name for field in attrs.fields(cls))}
        if strange := sorted(map(str, fields.raw.keys() - known)):
            fields.refuse(f"{strange[0]!r:.60}", f"{_FORM}: {', '.join(sorted(known))}")
        for name in sorted(known - {"adapter"}):
            fields.check(name in fields.raw, name, _FORM)
        texts: dict[str, Any] = {name: fields.value(name, None, _is_text, "a text") for name in _TEXTS}
        prompt, token_ids = (tuple(fields.items(name, int, "a list of token ids")) for name in ("prompt", "token_ids"))
        logprobs = fields.value("logprobs", None, _are_numbers, "a list of numbers, one for each of token_ids")
        fields.check(len(logprobs) == len(token_ids), "logprobs", "one number for each of token_ids")
        return cls(
            prompt=prompt,
            token_ids=token_ids,
            **texts,
            logprobs=tuple(map(float, logprobs)),
            max_tokens=fields.integer("max_tokens", None),
            adapter=fields.value("adapter", None, lambda x: x is None or _is_text(x), "a digest, or null"),
            sampling=_read_sampling(fields),
            versions=fields.value("versions", None, _are_texts, "an object of texts"),
        )

    def table(self) -> Table:
        """A table of what it holds."""
        done = f"{counted(len(self.token_ids), 'token')}, {self.finish_reason}"
        rows = {"prompt": counted(len(self.prompt), "token"), "completion": done, "sampling": repr(self.sampling)}
        rows |= {"adapter": self.adapter} if self.adapter else {}
        return Table.of({"": name, "value": value} for name, value in {**rows, **self.facts}.items())


def read_certificates(path: Path, call: str) -> list[Certificate]:
    """The certificates in a file, one per line.

    Raises:
        ConfigError, RequestError: the file cannot be read, or one of its lines is not a certificate.
    """
    lines = read_json_lines(path, call, "certificate", _FORM)
    return [Certificate.from_json(found, call, f"{path.name}, {name},") for name, found in lines]


_FORM = "what completion.certificate().save(path) writes"
_TEXTS = "finish_reason", "weights", "program"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value.values()))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(is_number(one, -1e38, 1e38) for one in value)


def _is_id(text: str) -> bool:
    """Whether this is a token id as JSON's keys have it.

    Raises:
        ValueError: it is not.
    """
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"logit_bias of {text!r:.60}")
    return True


def _read_sampling(fields: Fields) -> SamplingParams:
    given = dict(fields.value("sampling", None, lambda x: isinstance(x, Mapping), "an object"))
    known = {field.name for field in attrs.fields(SamplingParams)} - {*_UNSAID}
    if strange := given.keys() - known:
        fields.refuse(f"sampling.{min(strange):.60}", f"fields of weft.SamplingParams, without {', '.join(_UNSAID)}")
    fields.check(is_int(given.get("seed"), -(2**63), 2**63 - 1), "sampling", "it has the seed, a whole number")
    try:
        bias = {int(token): value for token, value in given.pop("logit_bias", {}).items() if _is_id(token)}
        return SamplingParams(**{"temperature": 0.0, **given, "logit_bias": bias})
    except (RequestError, TypeError, ValueError, AttributeError) as error:
        seen, instead = getattr(error, "seen", str(error)), getattr(error, "instead", "what weft.SamplingParams takes")
        fields.refuse(f"sampling with {seen:.200}", instead)


@attrs.define
class Provenance:
    """The model and the request that made a completion. It does not keep the model alive, and is not pickled. Any two
    are equal, so that equal completions are.

    Args:
        model: the model that made it.
        transport: where the stages ran.
        seen: `seen_of(model)` after it was made.
        sampling: the parameters that the user gave.
        adapter: its LoRA adapter.
        request: the engine's request.
    """

    model: "weakref.ref[Model]" = attrs.field(eq=False)
    transport: Transport = attrs.field(eq=False)
    seen: tuple[str, str] = attrs.field(eq=False)
    sampling: SamplingParams = attrs.field(eq=False)
    adapter: Adapter | None = attrs.field(eq=False)
    request: Request = attrs.field(eq=False)

    def __reduce__(self) -> Any:
        return type(None), ()


def certify(provenance: Provenance | None, completion: Any) -> Certificate:
    """The certificate of a completion: `Completion.certificate`."""
    call = "completion.certificate()"
    if provenance is None:
        seen, instead = "a completion that no model of this process made", "one that weft.generate(model, ...) returned"
        raise RequestError(call, seen, instead)
    model, request = provenance.model(), provenance.request
    if model is None:
        raise RequestError(call, "its model is gone", "keep the model until the certificate is made")
    if not model.functions.batch_invariant:
        seen = "a model that is not batch invariant: the bits of a completion depend on what else was in its batch"
        raise RequestError(call, seen, "weft.load(path, batch_invariant=True)")
    if completion.error is not None:
        raise RequestError(call, f"a completion that ended with an error: {completion.error.seen}", "one that did not")
    others = {
        "embeddings or positions of its own": EMBEDDED in request.prompt or request.given is not None,
        "inputs of its own for the model's stages": request.extras is not None,
        "a mask": request.is_masked and not provenance.sampling.bad_words,
    }
    if any(others.values()):
        seen = f"a request with {next(name for name, has in others.items() if has)}, which no certificate holds"
        raise RequestError(call, seen, "a request of token ids and sampling parameters alone")
    kinds = "weights that were changed since", "functions, or values that they read, which were changed since"
    for kind, own, then in zip(kinds, seen_of(model), provenance.seen, strict=True):
        if own != then:
            raise RequestError(call, kind, "completion.certificate() before they change")
    weights, program, versions = facts_of(model, provenance.transport)
    sampling = attrs.evolve(provenance.sampling, seed=request.sampling.seed, logprobs=None, prompt_logprobs=None, n=1)
    return Certificate(
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        sampling=sampling,
        adapter=None if provenance.adapter is None else digest(provenance.adapter.deltas),
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(completion.logprobs),
        finish_reason=completion.finish_reason,
        weights=weights,
        program=program,
        versions=versions,
    )


@attrs.frozen(repr=False)
class Verification(Tabled):
    """A completion that was computed again, beside its certificate.

    Args:
        certificate: what was certified.
        token_ids, logprobs, finish_reason: what was computed here.
        here: the facts here, by the names of `Certificate.facts`.
    """

    certificate: Certificate
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    here: Mapping[str, str]

    @property
    def first_difference(self) -> int | None:
        """The index of the first token that is not equal, or whose logprob is not, bit for bit; None: all are."""
        own, certified = (
            [*zip(one.token_ids, map(float.hex, one.logprobs), strict=True)] for one in (self, self.certificate)
        )
        same = next((i for i, (a, b) in enumerate(zip(own, certified, strict=False)) if a != b), None)
        return min(len(own), len(certified)) if same is None and len(own) != len(certified) else same

    @property
    def equal(self) -> bool:
        """Whether the completion is equal, bit for bit, and so are the weights."""
        same = self.first_difference is None and self.finish_reason == self.certificate.finish_reason
        return same and "weights" not in self.other_facts

    @property
    def other_facts(self) -> dict[str, tuple[str, str]]:
        """The facts that differ: here, and in the certificate."""
        wanted = self.certificate.facts
        names = sorted({*wanted, *self.here})
        pairs = {name: (self.here.get(name, "none"), wanted.get(name, "none")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def result(self) -> str:
        """`equal`, `equal, with other weights`, or the first token that is not, in words."""
        place, wanted = self.first_difference, self.certificate
        if place is None and self.finish_reason != wanted.finish_reason:
            return f"ends with {self.finish_reason!r}, certified {wanted.finish_reason!r}"
        if place is None:
            return "equal" if self.equal else "equal, with other weights"
        found, other = self.token_ids[place : place + 1], wanted.token_ids[place : place + 1]
        if found and found == other:
            return f"token {place}: logprob {self.logprobs[place]!r}, certified {wanted.logprobs[place]!r}"
        here, certified = (f"{ids[0]}" if ids else "none" for ids in (found, other))
        return f"token {place}: {here}, certified {certified}"

    def table(self) -> Table:
        """A table of the result, and of the facts that differ."""
        rows = [{"": "completion", "here": self.result, "certified": counted(len(self.certificate.token_ids), "token")}]
        rows += [{"": name, "here": own, "certified": other} for name, (own, other) in self.other_facts.items()]
        return Table.of(rows)


_RULES: dict[str, Rule] = {
    "certificates": (
        lambda given: isinstance(given, list | tuple) and given and all(isinstance(one, Certificate) for one in given),
        "weft.Certificate.load(path), or a list of them",
    ),
    "adapters": (
        lambda given: isinstance(given, list | tuple) and all(isinstance(one, Adapter) for one in given),
        "a list of weft.load_adapter(model, folder)",
    ),
}


def verify(
    certificates: Certificate | Sequence[Certificate],
    model: Model,
    *,
    pipeline: int = 1,
    graph: str = "full",
    transport: Transport | None = None,
    adapters: Sequence[Adapter] = (),
    speculation: Speculation | None = None,
    limits: EngineLimits | None = None,
) -> list[Verification]:
    """Compute certified completions again, all in one batch, in any split and mode, and compare them bit for bit.

    Args:
        certificates: of one completion or several, by models of the same weights.
        model: from `weft.load`; it is made batch invariant.
        pipeline, graph, transport, speculation, limits: as `Engine` takes them. Every rank makes the same call.
        adapters: the LoRA adapters that the certificates name by their digests.

    Returns:
        A verification for each, in order.

    Raises:
        RequestError: a certificate that this model cannot run, or of an adapter that was not given.

    >>> import weft
    >>> model = weft.load("demo", "cpu", batch_invariant=True)
    >>> several = weft.generate(model, ["The function returns", "A list"], max_tokens=8, temperature=1.0)
    >>> [verification] = verify(several[1].certificate(), model, pipeline=2, graph="none")
    >>> verification.result
    'equal'
    """
    call = "weft.verify(certificates, model)"
    given = [certificates] if isinstance(certificates, Certificate) else certificates
    check_values(call, _RULES, {"certificates": given, "adapters": adapters})
    model, carrier = model.with_stages(batch_invariant=True), transport or Local()
    named = {digest(own.deltas): own for own in adapters}
    if missing := [one.adapter for one in given if one.adapter is not None and one.adapter not in named]:
        seen = f"a completion of the adapter {missing[0]}, and adapters {', '.join(named) or 'none'}"
        raise RequestError(call, seen, "adapters=[weft.load_adapter(model, folder)] of that one")
    longest = min(max(len(one.prompt) + one.max_tokens for one in given), model.config.max_position_embeddings)
    limits = limits or EngineLimits(max_num_reqs=min(len(given), 64), max_model_len=longest)
    options: dict[str, Any] = {"transport": transport, "speculation": speculation, "adapters": named}
    engine = Engine(model, limits, pipeline=pipeline, graph=graph, seed=0, **options)
    for index, one in enumerate(given):
        engine.add([*one.prompt], one.sampling, max_tokens=one.max_tokens, id=str(index), adapter=one.adapter)
    states = {int(output.id): output for output in engine if output.finish_reason is not None}
    weights, program, versions = facts_of(model, carrier)
    here = {**versions, "weights": weights, "program": program}
    made = [states[index] for index in range(len(given))]
    return [
        Verification(one, tuple(own.track.token_ids), tuple(own.track.logprobs), own.track.reason, here)
        for one, own in zip(given, made, strict=True)
    ]
