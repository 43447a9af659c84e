"""`weft verify`: compute certified completions again, and compare every bit."""

from collections.abc import Iterator
from typing import Any

from weft.arguments.json_text import write_json
from weft.display.quantities import counted
from weft.display.tables import Table
from weft.stages.adapters.adapter import load_adapter
from weft.stages.custom.functions import default_page_size
from weft.transforms.cli.options import Verify
from weft.transforms.cli.printing import show
from weft.transforms.cli.ranks import Here, in_ranks, open_drafts, open_model, read_config
from weft.transforms.engine.evaluation.certificates import Certificate
from weft.transforms.engine.evaluation.verification import Verification, verify
from weft.transforms.engine.options import EngineLimits

# The most characters of a fact that are shown.
_SHOWN = 24


def run(options: Verify) -> int:
    """Verify the certificates and print the results; the exit code is 1 unless all are equal."""
    certificates = Certificate.load_all(options.certificate)
    read_config(options)  # refuse options that do not fit the model, before any rank starts
    results = in_ranks(_verify, options, options, certificates)
    if options.json:
        print("\n".join(write_json(_row(one)) for one in results))
    else:
        show(_shown(results))
    if all(one.equal for one in results):
        return 0
    return 1


def _verify(here: Here, options: Verify, certificates: list[Certificate]) -> list[Verification]:
    """Run in each process: verify with this process's part of the model."""
    model = open_model(options, here)
    limits = EngineLimits(
        max_num_reqs=min(options.max_num_seqs, len(certificates)),
        max_num_tokens=options.max_num_tokens,
        page_size=default_page_size(model.functions),
    )
    return verify(
        certificates,
        model,
        pipeline=here.num_stages,
        tensor=options.tp,
        graph=options.graph_mode,
        transport=here.transport,
        adapters=[load_adapter(model, folder) for folder in options.adapter],
        speculation=open_drafts(options, here),
        limits=limits,
    )


def _row(verification: Verification) -> dict[str, Any]:
    """A result as a JSON object."""
    facts = {
        name: {"here": here, "certified": other}
        for name, (here, other) in verification.other_facts.items()
    }
    first = verification.first_difference
    return {
        "equal": verification.equal,
        "result": verification.result,
        "first_difference": first,
        "other_facts": facts,
    }


def _shown(verifications: list[Verification]) -> Iterator[Any]:
    """A line for each certificate, then each differing fact once."""
    rows = (
        {
            "certificate": f"{number}",
            "tokens": f"{len(one.certificate.token_ids)}",
            "result": one.result,
        }
        for number, one in enumerate(verifications, 1)
    )
    yield Table.of(rows)
    facts = {
        (name, *map(_short, pair)): None
        for one in verifications
        for name, pair in one.other_facts.items()
    }
    if facts:
        yield Table.of(
            ({"fact": name, "here": here, "certified": other} for name, here, other in facts),
            "what differs",
        )
    equal = sum(one.equal for one in verifications)
    yield f"{equal} of {counted(len(verifications), 'completion')} equal, bit for bit"


def _short(fact: str) -> str:
    """A fact, cut to `_SHOWN` characters."""
    if len(fact) > _SHOWN:
        return f"{fact[:_SHOWN]}…"
    return fact
