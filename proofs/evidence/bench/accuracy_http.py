"""lm-evaluation-harness, unchanged, against `weft serve` in several graph modes and splits, and
against transformers.

    python -m weft.proofs.evidence.bench.accuracy_http --model DIR --lm-eval PATH/TO/lm_eval --out
    FOLDER

The tasks are written here: 200 sums that the model completes, 60 of them as a choice, and capitals
as a choice and as chats. All numbers are drawn with a fixed seed. Generation goes through
`local-completions`, and for chats through `local-chat-completions`; the log-likelihood of choices
through `local-completions` (`echo` and `logprobs`). lm_eval's own `hf` runs the same folder in
transformers. Compared with mode `none` are the accuracies, the answer to each question, and the
log-likelihood of each choice. The package needs no network: the tokenizer is the folder's.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.proofs.evidence.environment import environment
from weft.proofs.evidence.http.process import serving

# Without graphs first, since the others are compared with it; the last one also over a pipeline.
MODES: Mapping[str, Sequence[str]] = {
    "none": ("--graph", "none"),
    "piecewise": ("--graph", "piecewise"),
    "full": ("--graph", "full"),
    "full_and_piecewise, 2 stages": ("--graph", "full_and_piecewise", "--pp", "2"),
}
"""The flags of `weft serve`, by name; the others are compared with the first."""
GENERATED = ("sums",)
CHOICES = ("sums_choice", "capitals_choice")
CHATS = ("capitals",)
_PATTERNS = {"sums": r"(\d+)", "capitals": r"is ([A-Z][a-z]+(?: [A-Z][a-z]+)?)"}
# A base model completes a pattern: without examples it may go on with anything.
_SHOTS = "3 + 4 = 7\n12 + 5 = 17\n8 + 9 = 17\n21 + 6 = 27\n"
_CAPITALS = (
    "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna,"
    " Poland Warsaw, Greece Athens, Sweden Stockholm, Norway Oslo, Finland Helsinki, Denmark"
    " Copenhagen, Ireland Dublin, Hungary Budapest, Romania Bucharest, Bulgaria Sofia, Ukraine"
    " Kyiv, Russia Moscow, Turkey Ankara, Egypt Cairo, Kenya Nairobi, Ethiopia Addis_Ababa, Nigeria"
    " Abuja, Ghana Accra, Senegal Dakar, Morocco Rabat, Tunisia Tunis, Algeria Algiers, India"
    " New_Delhi, Pakistan Islamabad, Nepal Kathmandu, China Beijing, Japan Tokyo, Thailand Bangkok,"
    " Vietnam Hanoi, Indonesia Jakarta, Malaysia Kuala_Lumpur, Iran Tehran, Iraq Baghdad, Syria"
    " Damascus, Jordan Amman, Canada Ottawa, Mexico Mexico_City, Cuba Havana, Peru Lima, Chile"
    " Santiago, Argentina Buenos_Aires, Brazil Brasilia"
)


def questions(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The questions of each task, with four choices.

    >>> questions()["capitals_choice"][0]["text"]
    'The capital of France is'
    """
    draw = random.Random(seed)
    sums = list[dict[str, Any]]()
    capitals = list[dict[str, Any]]()
    for _ in range(200):
        a = draw.randint(1, 49)
        b = draw.randint(1, 49)
        near = draw.sample([d for d in range(-10, 11) if d and a + b + d > 0], 3)
        sums.append(_question(draw, f"{a} + {b} =", [a + b, *(a + b + d for d in near)]))
    pairs = [pair.replace("_", " ").split(" ", 1) for pair in _CAPITALS.split(", ")]
    for country, city in pairs:
        distractors = draw.sample([other for _, other in pairs if other != city], 3)
        capitals.append(_question(draw, f"The capital of {country} is", [city, *distractors]))
    chats = [{**question, "text": f"What is the{question['text'][3:-3]}?"} for question in capitals]
    return {"sums": sums, "sums_choice": sums[:60], "capitals_choice": capitals, "capitals": chats}


def _question(draw: random.Random, text: str, answers: Sequence[Any]) -> dict[str, Any]:
    choices = [str(answer) for answer in answers]
    right = choices[0]
    draw.shuffle(choices)
    return {"text": text, "answer": right, "choices": choices, "place": choices.index(right)}


def write_tasks(folder: Path) -> None:
    """Write the tasks as lm_eval reads them: for each a file of questions, and a YAML (which JSON
    is)."""
    for name, task_questions in questions().items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(question) + "\n" for question in task_questions))
        task: dict[str, Any] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            "description": _SHOTS if name.startswith("sums") else "",
        }
        if name in CHOICES:
            task |= {
                "output_type": "multiple_choice",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "place",
            }
            task["metric_list"] = [
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
            ]
        else:
            task |= {"output_type": "generate_until", "doc_to_target": "{{answer}}"}
            task["generation_kwargs"] = {
                "until": ["\n"],
                "max_gen_toks": 16,
                # Greedy, or the answers of two runs could not be compared one by one.
                "temperature": 0,
                "do_sample": False,
            }
            regex = {"function": "regex", "regex_pattern": _PATTERNS[name]}
            task["filter_list"] = [
                {"name": "extracted", "filter": [regex, {"function": "take_first"}]}
            ]
            task["metric_list"] = [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ]
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=1))


def evaluate(
    command: str, tasks: Path, model: str, arguments: str, names: Sequence[str], *more: str
) -> dict[str, Any]:
    """Run lm_eval; for each task its score, with the standard error, and each sample's answer."""
    with tempfile.TemporaryDirectory() as out:
        words = [
            command,
            "run",
            "--model",
            model,
            "--model_args",
            arguments,
            "--include_path",
            str(tasks),
        ]
        words += ["--tasks", ",".join(names), "--log_samples", "--output_path", out, *more]
        quiet = {
            # All that is needed is in the folder of the model: a request to the hub would only
            # wait.
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        # lm_eval may be of another environment, whose modules this path must not hide.
        variables = {name: item for name, item in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            words, env=variables | quiet, capture_output=True, text=True, timeout=3600
        )
        if ended.returncode:
            raise RuntimeError(f"{' '.join(words)}\n{ended.stderr[-3000:]}")
        (written,) = Path(out).rglob("results_*.json")
        raw = json.loads(written.read_text())
        scores = dict[str, Any]()
        results = raw["results"]
        for name in names:
            # A digit after the name, since `capitals` is the beginning of `capitals_choice`.
            (file,) = written.parent.glob(f"samples_{name}_[0-9]*.jsonl")
            samples = sorted(
                map(json.loads, file.read_text().splitlines()), key=lambda item: item["doc_id"]
            )
            metric = next(key for key in results[name] if key.startswith(("acc,", "exact_match,")))
            before, _, rest = metric.partition(",")
            scores[name] = {
                "value": results[name][metric],
                "stderr": results[name][f"{before}_stderr,{rest}"],
                "answers": [_answer(item) for item in samples],
                "lm_eval": raw["lm_eval_version"],
            }
    return scores


def _answer(sample: dict[str, Any]) -> Any:
    """A completion, or the log-likelihood of each choice."""
    responses = [response[0] for response in sample["resps"]]
    if isinstance(responses[0], str):
        return responses[0]
    return [float(response[0]) for response in responses]


def rows(results: dict[tuple[str, str], dict[str, Any]], base: str) -> Iterator[dict[str, Any]]:
    """For each run and task the score, and how it compares with the same task in mode `base` by the
    same API; choices are also compared with transformers."""
    for (mode, api), tasks in results.items():
        for name, score in tasks.items():
            # By the same API, as chats have other prompts. lm_eval's own run has the prompts of
            # completions.
            against = results[base, "local-completions" if api == "hf" else api][name]
            row = {
                "mode": mode,
                "api": api,
                "task": name,
                "value": score["value"],
                "stderr": score["stderr"],
            }
            row["questions"] = len(score["answers"])
            if name in CHOICES:
                pairs = [
                    (a, b)
                    for x, y in zip(score["answers"], against["answers"], strict=True)
                    for a, b in zip(x, y, strict=True)
                ]
                best = [
                    (x.index(max(x)), y.index(max(y)))
                    for x, y in zip(score["answers"], against["answers"], strict=True)
                ]
                row |= {
                    # The choice must be the same one. Its log-likelihood differs in the last digits
                    # with the shape.
                    "same": sum(a == b for a, b in best),
                    "largest_difference": max(abs(a - b) for a, b in pairs),
                }
            else:
                row["same"] = sum(
                    a == b for a, b in zip(score["answers"], against["answers"], strict=True)
                )
            yield row


def main(argv: Sequence[str] | None = None) -> None:
    """Run all modes, print the table, and write `accuracy_http.json`; exit with 1 if an answer
    differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="a checkpoint folder with a tokenizer and a chat template"
    )
    parser.add_argument("--lm-eval", default="lm_eval", help="the program (lm_eval)")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=[*MODES], help="the first is compared with"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--concurrent", type=int, default=8, help="requests at once (8)")
    parser.add_argument("--limit", type=int, help="questions of each task (all)")
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    if args.limit is None:
        more = []
    else:
        more = ["--limit", str(args.limit)]
    results: dict[tuple[str, str], dict[str, Any]] = {}
    flags = [
        # In float32, where two likely answers are hardly ever as close as rounding: half precision
        # would differ between modes, and between libraries.
        "--dtype",
        "float32",
        "--device",
        args.device,
        "--served-model-name",
        "served",
        "--max-num-seqs",
        "8",
    ]
    # Fewer tokens than the prompts of 8 requests have together, so that they are read in chunks and
    # among decodes.
    flags += ["--max-num-tokens", "128", "--max-model-len", "256"]
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        for mode in args.modes:
            with serving(args.model, *flags, *MODES[mode], seconds=900, shows_log=True) as server:
                common = f"model=served,tokenizer={args.model},num_concurrent={args.concurrent},max_retries=1"
                common += f",base_url={server.url}"
                text = f"{common}/completions,tokenizer_backend=huggingface"
                chat = f"{common}/chat/completions"
                for api, how, names, flag in (
                    ("local-completions", text, (*GENERATED, *CHOICES), []),
                    ("local-chat-completions", chat, CHATS, ["--apply_chat_template"]),
                ):
                    results[mode, api] = evaluate(
                        args.lm_eval, Path(folder), api, how, names, *flag, *more
                    )
            print(
                *(row for row in rows(results, args.modes[0]) if row["mode"] == mode),
                sep="\n",
                flush=True,
            )
        theirs = f"pretrained={args.model},dtype=float32"
        results["transformers", "hf"] = evaluate(
            args.lm_eval,
            Path(folder),
            "hf",
            theirs,
            (*GENERATED, *CHOICES),
            "--device",
            args.device,
            *more,
        )
    table = [*rows(results, args.modes[0])]
    print(*table, sep="\n")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        version = results["transformers", "hf"][CHOICES[0]]["lm_eval"]
        record = {"model": Path(args.model).name, "lm_eval": version, "rows": table}
        text = json.dumps({**record, "environment": environment(args.device)}, indent=1)
        (args.out / "accuracy_http.json").write_text(text + "\n")
    sys.exit(any(row["same"] != row["questions"] for row in table))


if __name__ == "__main__":
    main()
