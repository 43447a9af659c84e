"""`Certificate`: all that fixes the bits of a completion, so that anybody can recompute and check
it."""

import json
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from weft.arguments.checks import is_int, is_number
from weft.arguments.json_text import Fields, read_json_lines
from weft.batches.sampling import SamplingParams
from weft.display.quantities import counted
from weft.display.tables import Table, Tabled
from weft.errors import RequestError
from weft.ops.requests import EMBEDDED
from weft.stages.adapters.adapter import Adapter
from weft.stages.model import Model
from weft.transforms.engine.evaluation.facts import digest, digest_tokenizer, facts_of, seen_of
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.pipelines.transports import Transport

FORMAT = "weft certificate 1"
# Fields of the sampling parameters that are left out: they change no token of a completion.
_UNSAID = "logprobs", "prompt_logprobs", "n"


@attrs.frozen(kw_only=True, repr=False)
class Certificate(Tabled):
    """A completion of a batch-invariant model, and all that its bits depend on. It prints as a
    table. `save_all` and `load_all` write and read files of certificates in JSON, one per line, as
    `weft generate --certificates` does.

    It does not prove that custom functions in the stages are batch invariant: two completions that
    are verified together may be equal although each alone would not be. `weft.proofs.check(f,
    given, batch_invariant=True)` looks for such functions.

    Args:
        prompt: the token ids.
        max_tokens: the most tokens to generate.
        sampling: how tokens were chosen, with the completion's own seed.
        adapter: a digest of the LoRA adapter's matrices; None: the model alone.
        token_ids, logprobs, finish_reason: the completion.
        weights: a digest of all weights, byte for byte.
        program: a digest of the configuration, and of the custom functions in the stages: of their
            bytecode, and of the values that they close over and read, including tensors. It names
            the types of values that have no digest, such as a lock. It does not cover operators
            registered with torch, nor C extensions.
        tokenizer: a digest of the tokenizer, if the completion depends on it (`stop`, `bad_words`);
            None: no bit depends on it.
        versions: the versions of weft (with a digest of its source), Python, torch and triton; and
            the device.
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
    tokenizer: str | None = None
    versions: Mapping[str, str]

    @staticmethod
    def save_all(certificates: Iterable["Certificate"], path: Path | str) -> None:
        """Write certificates to a file, one per line.

        Raises:
            RequestError: the file cannot be written.
        """
        _write(path, certificates, f"weft.Certificate.save_all(certificates, {str(path)!r})")

    @staticmethod
    def load_all(path: Path | str) -> list["Certificate"]:
        """Read all certificates of a file, one per line.

        Raises:
            ConfigError, RequestError: the file cannot be read, or one of its lines is not a
                certificate.
        """
        return _read(path, f"weft.Certificate.load_all({str(path)!r})")

    def _table(self) -> Table:
        """A table of what it holds."""
        done = f"{counted(len(self.token_ids), 'token')}, {self.finish_reason}"
        rows = {
            "prompt": counted(len(self.prompt), "token"),
            "completion": done,
            "sampling": repr(self.sampling),
        }
        rows |= {"adapter": self.adapter} if self.adapter else {}
        return Table.of(
            {"": name, "value": value} for name, value in {**rows, **certified_facts(self)}.items()
        )


def certified_facts(certificate: Certificate) -> dict[str, str]:
    """All facts that the bits depend on except the request, by name."""
    facts = {**certificate.versions, "weights": certificate.weights, "program": certificate.program}
    if certificate.tokenizer is None:
        return facts
    return {**facts, "tokenizer": certificate.tokenizer}


def as_json(certificate: Certificate) -> str:
    """The certificate as one line of JSON."""
    values = attrs.asdict(certificate, recurse=False)
    fields = attrs.fields(SamplingParams)
    sampling_values = {f.name: getattr(certificate.sampling, f.name) for f in fields}
    # `_read_sampling` fills in what is left out here, with the same greedy temperature.
    default = SamplingParams(temperature=0.0)
    values["sampling"] = {
        name: x
        for name, x in sampling_values.items()
        if x != getattr(default, name) or name == "seed"
    }
    return json.dumps({"format": FORMAT, **values})


def from_json(raw: Any, call: str, source: str) -> Certificate:
    """The certificate in a JSON value.

    Args:
        call, source: the call as written, and the origin of the value, for errors.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    fields = Fields(raw if isinstance(raw, Mapping) else {}, call, source)
    fields.check(fields.raw.get("format") == FORMAT, "format", f"{_FORM}: format={FORMAT!r}")
    field_names = {"format", *(field.name for field in attrs.fields(Certificate))}
    # A newer version may certify a fact that this one cannot compare. To ignore it would be to call
    # completions equal that may not be.
    if strange := sorted(map(str, fields.raw.keys() - field_names)):
        fields.refuse(f"{strange[0]!r:.60}", f"{_FORM}: {', '.join(sorted(field_names))}")
    for name in sorted(field_names - {*_OPTIONAL}):
        fields.check(name in fields.raw, name, _FORM)
    texts: dict[str, Any] = {name: fields.value(name, None, _is_text, "a text") for name in _TEXTS}
    prompt, token_ids = (
        tuple(fields.items(name, int, "a list of token ids")) for name in ("prompt", "token_ids")
    )
    logprobs = fields.value(
        "logprobs", None, _are_numbers, "a list of numbers, one for each of token_ids"
    )
    fields.check(len(logprobs) == len(token_ids), "logprobs", "one number for each of token_ids")
    return Certificate(
        prompt=prompt,
        token_ids=token_ids,
        **texts,
        logprobs=tuple(map(float, logprobs)),
        max_tokens=fields.integer("max_tokens", None),
        **{
            name: fields.value(name, None, lambda x: x is None or _is_text(x), _DIGEST)
            for name in _OPTIONAL
        },
        sampling=_read_sampling(fields),
        versions=fields.value("versions", None, _are_texts, "an object of texts"),
    )


def _read(path: Path | str, call: str) -> list[Certificate]:
    file = Path(path)
    lines = read_json_lines(file, call, "certificate", _FORM)
    return [from_json(raw, call, f"{file.name}, {name},") for name, raw in lines]


def _write(path: Path | str, certificates: Iterable[Certificate], call: str) -> None:
    text = "".join(f"{as_json(one)}\n" for one in certificates)
    try:
        Path(path).write_text(text, encoding="utf-8")
    # ValueError: a path with a NUL character, or text that UTF-8 cannot encode.
    except (OSError, ValueError) as error:
        problem = f"{getattr(error, 'strerror', error)}: {path!s:.300}"
        raise RequestError(
            call, problem, "a file that can be written, in a folder that exists"
        ) from error


_FORM = "what completion.certificate().save(path) writes"
_TEXTS = "finish_reason", "weights", "program"
_OPTIONAL = ("adapter", "tokenizer")
_DIGEST = "a digest, or null"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value.values()))


def _are_numbers(value: Any) -> bool:
    # The bounds matter because Python's json reads NaN and Infinity, which no sampled token has.
    return isinstance(value, list) and all(is_number(one, -1e38, 1e38) for one in value)


def _is_id(text: str) -> bool:
    """True for a token id in the form of a JSON key.

    Raises:
        ValueError: it is not.
    """
    # `int` alone would also read " 7", "+7" and "1_0".
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"logit_bias of {text!r:.60}")
    return True


def _read_sampling(fields: Fields) -> SamplingParams:
    raw = dict(fields.value("sampling", None, lambda x: isinstance(x, Mapping), "an object"))
    field_names = {field.name for field in attrs.fields(SamplingParams)} - {*_UNSAID}
    if strange := raw.keys() - field_names:
        fields.refuse(
            f"sampling.{min(strange):.60}",
            f"fields of weft.SamplingParams, without {', '.join(_UNSAID)}",
        )
    fields.check(
        # The range of int64, in which the device state holds seeds.
        is_int(raw.get("seed"), -(2**63), 2**63 - 1),
        "sampling",
        "it has the seed, a whole number",
    )
    try:
        bias = {
            int(token): value for token, value in raw.pop("logit_bias", {}).items() if _is_id(token)
        }
        return SamplingParams(**{"temperature": 0.0, **raw, "logit_bias": bias})
    except (RequestError, TypeError, ValueError, AttributeError) as error:
        problem = getattr(error, "seen", str(error))
        instead = getattr(error, "instead", "what weft.SamplingParams takes")
        fields.refuse(f"sampling with {problem:.200}", instead)


@attrs.define
class Provenance:
    """The model and the request that made a completion. It does not keep the model alive, and is
    not pickled. It takes no part in comparisons, so that equal completions compare equal.

    Args:
        model: the model that made it.
        transport: where the stages ran.
        fingerprint: `seen_of(model)` after it was made.
        sampling: the parameters that the user gave.
        adapter: its LoRA adapter.
        request: the engine's request.
    """

    model: "weakref.ref[Model]" = attrs.field(eq=False)
    transport: Transport = attrs.field(eq=False)
    fingerprint: tuple[str, str] = attrs.field(eq=False)
    sampling: SamplingParams = attrs.field(eq=False)
    adapter: Adapter | None = attrs.field(eq=False)
    request: Request = attrs.field(eq=False)

    def __reduce__(self) -> Any:
        # A weak reference cannot be pickled: the copy has None in its place.
        return type(None), ()


def certify(provenance: Provenance | None, completion: Any) -> Certificate:
    """The certificate of a completion: `Completion.certificate`."""
    call = "completion.certificate()"
    if provenance is None:
        problem = "a completion that no model of this process made"
        instead = "one that weft.generate(model, ...) returned"
        raise RequestError(call, problem, instead)
    model = provenance.model()
    request = provenance.request
    if model is None:
        raise RequestError(
            call, "its model is gone", "keep the model until the certificate is made"
        )
    if not model.functions.batch_invariant:
        problem = (
            "a model that is not batch invariant: the bits of a completion depend on what else was"
            " in its batch"
        )
        raise RequestError(call, problem, "weft.load(path, batch_invariant=True)")
    if completion.error is not None:
        raise RequestError(
            call,
            f"a completion that ended with an error: {completion.error.problem}",
            "one that did not",
        )
    unsupported = {
        "embeddings or positions of its own": (
            EMBEDDED in request.prompt or request.prompt_content is not None
        ),
        "inputs of its own for the model's stages": request.extras is not None,
        # `bad_words` also become a mask, but the certificate names the words, from which `verify`
        # makes that mask again.
        "a mask": request.is_masked and not provenance.sampling.bad_words,
    }
    if any(unsupported.values()):
        problem = (
            f"a request with {next(name for name, has in unsupported.items() if has)}, which no"
            " certificate holds"
        )
        raise RequestError(call, problem, "a request of token ids and sampling parameters alone")
    kinds = (
        "weights that were changed since",
        "functions, or values that they read, which were changed since",
    )
    # The digests are made now. For weights that changed since, they would certify bits that other
    # weights computed.
    for kind, current, then in zip(kinds, seen_of(model), provenance.fingerprint, strict=True):
        if current != then:
            raise RequestError(call, kind, "completion.certificate() before they change")
    weights, program, versions = facts_of(model, provenance.transport)
    # With the completion's own seed, and n=1: the later ones of n completions have derived seeds,
    # and each is computed again alone.
    sampling = attrs.evolve(
        provenance.sampling, seed=request.sampling.seed, logprobs=None, prompt_logprobs=None, n=1
    )
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
        tokenizer=digest_tokenizer(model, sampling),
        versions=versions,
    )
