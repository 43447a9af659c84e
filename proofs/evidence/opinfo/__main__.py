"""Run torch's operator database through `graphify`, compare each result with eager bit for bit, and
write a record.

`python -m weft.proofs.evidence.opinfo --out FOLDER` takes half an hour of two cores with all
samples, and five minutes with `--samples 10`. It exits with 1 if a result differs or an error is
not eager's. With `--compiler aot_eager` the graphs are compiled.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from tqdm.auto import tqdm

from weft.errors import DeviceError
from weft.proofs._strategies.operator_samples import DTYPES, TRANSFORMS
from weft.proofs.evidence.environment import environment
from weft.proofs.evidence.opinfo.record import FAULTS, Record
from weft.proofs.evidence.opinfo.workers import Settings, run_all, tasks
from weft.torchapi.inductor import compilers


def settings_of(arguments: Sequence[str] | None = None) -> tuple[Settings, Path]:
    """The settings of the command line, and the folder to write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtypes", help=f"names, by commas (default: {','.join(DTYPES)}; on cuda float32,bfloat16)"
    )
    parser.add_argument(
        "--transforms", default=",".join(TRANSFORMS), help="names, by commas (default: %(default)s)"
    )
    parser.add_argument("--ops", default="", help="a part of the names of the operators to run")
    parser.add_argument(
        "--samples",
        type=int,
        help="the most samples per operator, transform and dtype (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, help="the time after which no further operator starts"
    )
    parser.add_argument(
        "--compiler",
        choices=compilers(),
        metavar="NAME",
        help="of the graphs, as in weft.graphify (default: nothing is compiled)",
    )
    args = parser.parse_args(arguments)
    dtypes = tuple(
        (args.dtypes or ("float32,bfloat16" if args.device == "cuda" else ",".join(DTYPES))).split(
            ","
        )
    )
    transforms = tuple(args.transforms.split(","))
    for option, names, choices in (
        ("dtypes", dtypes, DTYPES),
        ("transforms", transforms, TRANSFORMS),
    ):
        # A name that is misspelt would select nothing, and a run of nothing has no fault.
        if unknown := [name for name in names if name not in choices]:
            parser.error(f"--{option} {unknown[0]}: write some of {','.join(choices)}")
    if min(args.jobs, 1 if args.samples is None else args.samples) < 1:
        parser.error("--jobs and --samples are at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "weft.proofs.evidence.opinfo --device cuda",
            "this machine has no CUDA device",
            "--device cpu",
        )
    settings = Settings(
        args.device,
        transforms,
        dtypes,
        args.ops,
        args.samples,
        args.seed,
        args.jobs,
        args.minutes,
        args.compiler,
    )
    return settings, args.out


def main() -> int:
    """Run what the command line asks for, and write the record."""
    # Read before the database is, which takes seconds: an error of the command line should not.
    settings, folder = settings_of()
    todo = tasks(settings)
    start = time.monotonic()
    record = Record(attrs.asdict(settings), len(todo))
    try:
        # No smoothing: operators take from milliseconds to minutes, so that only the mean rate says
        # anything.
        with tqdm(run_all(settings, todo), total=len(todo), unit="operator", smoothing=0) as bar:
            for results in bar:
                record.add(results)
                for fault in (outcome for outcome in results if outcome.kind in FAULTS):
                    bar.write(f"{fault.kind}: {fault.arguments or fault.operator}: {fault.detail}")
    # The order of tasks is shuffled, so that what was done by now is a fair sample, worth a record.
    except KeyboardInterrupt:
        print("interrupted: the record holds what was done")
    record.seconds = time.monotonic() - start
    path = record.write(folder, environment(settings.device))
    print(path.read_text(encoding="utf-8").partition("## refused")[0])
    if record.faults:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
