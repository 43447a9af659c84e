"""`weft bench`: its figures against counts by hand and by the graphs; modes and splits score the
same."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from cli_calls import Weft, assert_refused

from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.random_weights import PRESETS
from weft.transforms.cli import bench
from weft.transforms.cli.bench import as_report, start_engine, tables
from weft.transforms.cli.main import main
from weft.transforms.cli.options import PRESETS as NAMES, WORKLOADS, Bench, Generate, Serve, Verify
from weft.transforms.cli.printing import show
from weft.transforms.cli.ranks import Here
from weft.transforms.engine.evaluation.scoring import Score
from weft.transforms.engine.evaluation.serving import RankFigures, Served, figures, serve
from weft.transforms.engine.stats import Stats
from weft.transforms.graphs.ladder import MODES
from weft.transforms.pipelines.transports.local import Local

HELD_OUT = Path(__file__).parent / "held_out.jsonl"
SMALL = (
    "--input-len",
    "6",
    "--output-len",
    "5",
    "--num-prompts",
    "7",
    "--max-num-seqs",
    "4",
    "--max-num-tokens",
    "16",
)


@pytest.fixture
def run(run: Weft) -> Weft:
    """The output of `weft bench ARGS`."""
    return partial(run, "bench")


def measured(run: Weft, *more: str) -> Any:
    code, out, err = run("--preset", "tiny", "--device", "cpu", "--json", *SMALL, *more)
    assert (code, err) == (0, "")
    return json.loads(out)


# the figures


@pytest.mark.one_of(10, 3)
@pytest.mark.parametrize("graph", MODES)
@pytest.mark.parametrize("pp", ["1", "2"])
def test_every_token_is_counted_and_nothing_is_captured_meanwhile(
    run: Weft, graph: str, pp: str
) -> None:
    report = measured(run, "--graph", graph, "--pp", pp, "--transport", "local")
    assert (report["num_requests"], report["output_tokens"], report["total_tokens"]) == (7, 35, 77)
    assert report["output_tokens_per_s"] == pytest.approx(35 / report["seconds"])
    assert report["total_tokens_per_s"] == pytest.approx(77 / report["seconds"])
    assert report["captures"] == 0
    assert all(
        0 < report["ttft"][name] < 1e3 * report["seconds"] for name in ("mean", "p50", "p99")
    )
    (rank,) = report["ranks"]
    assert (rank["num_graphs"] > 0, rank["graph_bytes"] > 0) == (graph != "none",) * 2
    assert min(rank["load_seconds"], rank["engine_seconds"], rank["warm_up_seconds"]) > 0
    assert rank["first_token_seconds"] > sum(
        rank[f"{part}_seconds"] for part in ("load", "engine", "capture")
    )
    shares = report["graphs"]["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    none = shares["none"]
    piecewise = shares["piecewise"]
    full = shares["full"]
    expected = {
        "none": none == 1,
        "piecewise": piecewise == 1,
        "full_decode_only": full > none > 0 == piecewise,
        "full": full > none > 0 == piecewise,  # more tokens than 4 requests can decode
        "full_and_piecewise": full > piecewise > 0 == none,
    }
    assert expected[graph]


def options(graph: str, pp: int) -> Bench:
    sizes = {
        "input_len": 6,
        "output_len": 5,
        "num_prompts": 7,
        "max_num_seqs": 4,
        "max_num_tokens": 16,
    }
    return Bench(
        preset="tiny", graph=graph, pp=pp, temperature=0.0, transport="local", device="cpu", **sizes
    )


@pytest.mark.one_of(2)
@pytest.mark.parametrize("graph", [mode for mode in MODES if mode != "none"])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_shares_are_what_the_graphs_counted(graph: str, pp: int) -> None:
    bench_options = options(graph, pp)
    engine, _ = start_engine(Here(Local(), pp, "cpu"), bench_options)
    before = [one.cache_info() for one in engine.graphs]
    run_figures = figures(
        serve(engine, [[i, 1, 2, 3, 4, 5] for i in range(7)], bench_options.temperature, 5), 6, []
    )
    assert len(engine.graphs) == pp
    for was, one in zip(before, engine.graphs, strict=True):
        now = one.cache_info()
        replays = now.replays - was.replays
        eager = now.eager - was.eager
        assert replays + eager == run_figures["num_steps"]
        assert run_figures["graphs"]["shares"]["none"] == pytest.approx(eager / (replays + eager))


NOTHING: Any = {
    field.name: {} if "Mapping" in str(field.type) else 0 for field in attrs.fields(Stats)
}


@pytest.mark.slow
def test_requests_wait_for_pages_where_few_are_asked_for(run: Weft) -> None:
    report = measured(run, "--num-pages", "1")
    assert report["wanted"]["num_pages"] == 1
    assert report["output_tokens"] == 35
    assert report["num_steps"] == 35, "one request of one page after the other"


@pytest.mark.slow
def test_the_tables_are_for_reading(run: Weft) -> None:
    code, out, err = run("--preset", "tiny", "--device", "cpu", *SMALL)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines()]
    for part in (
        "tiny, 1 stage, graphs: none",
        "time to the first token (TTFT)",
        "(TPOT)",
        "(ITL)",
    ):
        assert part in out
    assert ["requests", "in", "out", "seconds", "output", "tok/s", "total", "tok/s"] in lines
    assert any(line[:3] == ["7", "6", "5"] for line in lines)
    assert any(line[:2] == ["0", "cpu"] for line in lines)


@pytest.mark.parametrize("command", [Bench, Generate, Serve, Verify])
def test_a_cpu_has_graphs_only_where_they_are_asked_for(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take seconds to capture, and no step less."""
    arguments: dict[str, str] = {"model": "demo"} | (
        {"certificate": "file"} if command is Verify else {}
    )
    assert command(**arguments, device="cpu").graph_mode == "none"
    assert command(**arguments, device="cpu", graph="full").graph_mode == "full"
    if command is not Verify:
        compiled = command(**arguments, device="cpu", compiler="inductor")
        assert compiled.graph_mode == "full_and_piecewise"  # or nothing would be compiled
    for name, value in (("is_available", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert command(**arguments).graph_mode == "full_and_piecewise"
    assert command(**arguments, graph="none").graph_mode == "none"


def test_the_start_of_gpus_fits_a_terminal_with_its_headers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    before = Stats(**NOTHING)
    rank = RankFigures("cuda:7", 102.34, 11.23, 126.1, 1.0, 528.25, 162, 4700 * 2**20, 137 * 2**30)
    run_figures = figures(
        Served([[1.0]], before, attrs.evolve(before, modes={"full": 1})), 10, [rank]
    )
    show(tables(as_report(options("full", 1), {"max_num_tokens": 64, **run_figures})))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split() for line in lines]
    assert [
        "rank",
        "device",
        "load",
        "engine",
        "capture",
        "first",
        "token",
        "graphs",
        "MiB",
        "GiB",
    ] in shown
    assert [
        "0",
        "cuda:7",
        "102.34",
        "11.23",
        "126.10",
        "528.25",
        "162",
        "4700.0",
        "137.00",
    ] in shown


@pytest.mark.slow
@pytest.mark.parametrize("pp", ["1", "2"])
def test_drafts_are_counted(run: Weft, pp: str) -> None:
    """All drafts of a model that drafts for itself are right; nothing is captured while the clock
    runs."""
    model = (
        "--model",
        str(DEMO),
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--draft",
        str(DEMO),
        "--speculate",
        "2",
    )
    code, out, _ = run(
        *model, "--pp", pp, "--transport", "local", "--json", *SMALL, "--max-num-tokens", "16"
    )
    report = json.loads(out)
    assert (code, report["output_tokens"], report["captures"], report["wanted"]["speculate"]) == (
        0,
        35,
        0,
        2,
    )
    assert report["accepted"] == report["drafted"] > 0
    _, shown, _ = run(*model, *SMALL)
    assert ["by", "a", "step", "verified", "right", "share"] in [
        line.split() for line in shown.splitlines()
    ]


def test_a_checkpoint_in_ranks_of_its_own_and_a_file(run: Weft, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    model = (
        "--model",
        str(DEMO),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--pp",
        "2",
        "--graph",
        "full",
    )
    code, shown, err = run(*model, *SMALL, "--out", str(out), "--max-step-seconds", "60")
    assert (code, err) == (0, "")
    assert shown.startswith(f"{DEMO}, 2 stages, graphs: full\n")
    report = json.loads(out.read_text())
    assert [rank["num_graphs"] > 0 for rank in report["ranks"]] == [True, True]
    assert (report["wanted"]["model"], report["wanted"]["max_step_seconds"]) == (str(DEMO), 60)
    assert (report["wanted"]["stages"], report["wanted"]["dummy"], report["output_tokens"]) == (
        2,
        False,
        35,
    )


@pytest.mark.slow
def test_random_weights_for_a_folder(run: Weft) -> None:
    code, out, _ = run(
        "--model", str(DEMO), "--load-format", "dummy", "--device", "cpu", "--json", *SMALL
    )
    assert (code, json.loads(out)["wanted"]["dummy"]) == (0, True)


def test_a_folder_without_weights_is_told_of_random_ones(run: Weft, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    code, _, err = run("--model", str(tmp_path), "--device", "cpu", *SMALL)
    assert code != 0
    assert "has no model.safetensors" in err
    assert "or random weights: --load-format dummy" in err.replace("\n", " ")


def test_workloads_are_the_usual_ones() -> None:
    assert WORKLOADS == {"decode": (2, 512), "prefill": (512, 64), "mixed": (512, 512)}


# presets


def test_the_flag_takes_every_preset() -> None:
    assert tuple(PRESETS) == NAMES


def test_plan_takes_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("plan", "--preset", "qwen3-0.6b", "--pp", "2", "--json")) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["architecture"], model["num_layers"]) == ("Qwen3ForCausalLM", 28)


# --eval


def scored(run: Weft, *more: str) -> tuple[int, Any]:
    model = ("--model", str(DEMO), "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16")
    code, out, err = run(*model, "--eval", str(HELD_OUT), "--json", *more)
    assert err == ""
    return code, json.loads(out)


@pytest.mark.nightly
def test_the_shipped_checkpoint_scores_the_same_in_every_mode_and_split(run: Weft) -> None:
    code, report = scored(run, "--pp", "1,2,3", "--transport", "local")
    assert (code, report["agree"]) == (0, True)
    scores = report["scores"]
    assert [(score["graph"], score["stages"]) for score in scores] == [
        (g, pp) for pp in (1, 2, 3) for g in MODES
    ]
    for score in scores:
        same = ("bits_per_byte", "bits_per_token", "perplexity", "accuracy", "difference")
        assert [score[name] for name in same] == [scores[0][name] for name in same], (
            "to the last bit"
        )
        assert (score["accuracy"], score["difference"]) == (0.8, 0.0)
        assert score["replayed"] == {"none": 0.0, "full_decode_only": score["replayed"]}.get(
            score["graph"], 1.0
        )
        assert (score["replayed"] > 0) == (score["graph"] != "none")


@pytest.mark.slow
def test_the_score_is_that_of_the_models_own_logits(run: Weft) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = load(DEMO, "cpu", "float32")
    bits = 0.0
    count = 0
    for text in (
        task["text"]
        for task in map(json.loads, HELD_OUT.read_text().splitlines())
        if "text" in task
    ):
        ids = torch.tensor([model.encode(text)])
        with torch.no_grad():
            logprobs = reference(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        bits = bits - logprobs.sum().item() / math.log(2)
        count = count + len(logprobs)
    _, report = scored(run, "--graph", "none")
    assert report["tokens"] == count
    assert report["scores"][0]["bits_per_token"] == pytest.approx(bits / count, abs=1e-4)


@pytest.mark.slow
def test_ranks_of_their_own_score_the_same(run: Weft) -> None:
    code, report = scored(run, "--pp", "1,2", "--graph", "full")
    assert (code, [score["stages"] for score in report["scores"]]) == (0, [1, 2])


@pytest.mark.slow
def test_long_texts_go_in_windows_and_bytes_are_those_that_are_scored(
    run: Weft, tmp_path: Path
) -> None:
    file = tmp_path / "long.jsonl"
    text = "é" + "A list is a list. " * 60
    file.write_text(json.dumps({"text": text}) + "\n\n")
    model = ("--model", str(DEMO), "--device", "cpu", "--graph", "none", "--json")
    code, out, _ = run(*model, "--eval", str(file))
    report = json.loads(out)
    assert (code, report["questions"], report["scores"][0]["accuracy"]) == (0, 0, None)
    # One token per byte, and the first byte is not predicted
    assert report["tokens"] == len(text.encode()) - 1
    assert report["bytes"] == len(text.encode()) - 2  # nor is the character that it begins


Plant = Callable[[Score], Score]


def _worse(score: Score) -> Score:
    return attrs.evolve(score, logprobs=[[x - 1e-3 for x in row] for row in score.logprobs])


def _other_answer(score: Score) -> Score:
    return attrs.evolve(score, answers=[("?", False), *score.answers[1:]])


def _nan(score: Score) -> Score:
    return attrs.evolve(score, logprobs=[[math.nan, *score.logprobs[0][1:]], *score.logprobs[1:]])


def _cut(score: Score) -> Score:
    return attrs.evolve(score, logprobs=[score.logprobs[0][1:], *score.logprobs[1:]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        _worse,
        *(pytest.param(one, marks=pytest.mark.nightly) for one in (_other_answer, _nan, _cut)),
    ],
)
def test_a_mode_that_scores_otherwise_is_found(
    run: Weft, monkeypatch: pytest.MonkeyPatch, damage: Plant
) -> None:
    score = bench._score

    def planted(here: Any, options: Any, model: Any, graph: str, *rest: Any) -> Score:
        sound_score = score(here, options, model, "none", *rest)
        return damage(sound_score) if graph == "full" else sound_score

    monkeypatch.setattr(bench, "_score", planted)
    code, report = scored(run, "--max-num-tokens", "512")
    assert (code, report["agree"]) == (1, False)
    assert [row["graph"] for row in report["scores"] if not row["agrees"]] == ["full"]
    code, out, _ = run(
        "--model", str(DEMO), "--device", "cpu", "--dtype", "float32", "--eval", str(HELD_OUT)
    )
    assert code == 1
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert "do NOT score the same" in out
    assert out.count("DIFFERS") == 1


BAD_TASKS: dict[str, tuple[str, str]] = {
    "nothing": ("\n", "no task in it"),
    "no JSON": ('{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
    "a list": ('["a"]', "line 1 has no names"),
    "a mixture": ('{"text": "a", "answer": "b"}', "line 1 has 'answer', 'text'"),
    "a number": ('{"text": 1}', "line 1 has text=1"),
    "an empty answer": ('{"prompt": "a", "answer": ""}', "line 1 has answer=''"),
    "too long": (json.dumps({"prompt": "a" * 500, "answer": "b" * 13}), "line 1 has 513 tokens"),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_bad_tasks_are_named_by_their_line(run: Weft, tmp_path: Path, case: str) -> None:
    text, problem = BAD_TASKS[case]
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    assert_refused(
        run("--model", str(DEMO), "--device", "cpu", "--eval", str(file)),
        f"--eval {file}",
        f"saw: {problem}",
    )


# bad input: exit code 2, the error on stderr, nothing on stdout


TINY = ("--preset", "tiny", "--device", "cpu")
SCORE = ("--model", str(DEMO), "--device", "cpu", "--eval", str(HELD_OUT))
BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no model": (("--device", "cpu"), "one of the arguments --model --preset is required"),
    "two models": ((*TINY, "--model", "m"), "not allowed with argument"),
    "an unknown preset": (("--preset", "gpt"), "argument --preset: invalid choice: 'gpt'"),
    "weights of a preset": ((*TINY, "--load-format", "auto"), "a preset has no weights"),
    "half the lengths": (
        (*TINY, "--input-len", "2"),
        "saw: no --output-len\n  instead: --input-len N --output-len N",
    ),
    "lengths twice": (
        (*TINY, *SMALL, "--workload", "mixed"),
        (
            "weft bench --workload mixed\n  saw: --workload has no effect with --input-len"
            " and --output-len\n  instead: leave out --workload, or --input-len and"
            " --output-len"
        ),
    ),
    "a compiler of no graphs": (
        (*TINY, "--compiler", "inductor", "--graph", "none"),
        "weft bench --compiler inductor\n  saw: no graphs to compile with --graph none",
    ),
    "a compiler of sums in order": (
        (*TINY, "--compiler", "inductor", "--batch-invariant"),
        "saw: --compiler has no effect with --batch-invariant",
    ),
    "an unknown compiler": (
        (*TINY, "--compiler", "inductr"),
        "weft bench --compiler inductr\n  saw: --compiler inductr, which is no compiler of torch",
    ),
    "no prompt": (
        (*TINY, "--num-prompts", "0"),
        "argument --num-prompts: '0': write a whole number from 1 to 1048576",
    ),
    "no output": (
        (*TINY, "--input-len", "1", "--output-len", "0"),
        "argument --output-len: '0': write a whole number from 1",
    ),
    "behind": (
        (*TINY, "--run-ahead", "-1"),
        "argument --run-ahead: '-1': write a whole number from 0",
    ),
    "few tokens a step": (
        (*TINY, "--max-num-tokens", "64"),
        "saw: 64 tokens a step for 128 requests",
    ),
    "too long": (
        (*TINY, "--input-len", "2000", "--output-len", "49"),
        "saw: requests of 2049 tokens",
    ),
    "all modes": (
        (*TINY, "--graph", "all"),
        "weft bench --graph all\n  saw: several modes or splits",
    ),
    "several splits": (
        (*TINY, "--pp", "1,2"),
        "weft bench --pp 1,2\n  saw: several modes or splits",
    ),
    "a split in words": ((*TINY, "--pp", "two"), "argument --pp: 'two': write a whole number"),
    "more stages than layers": (
        (*TINY, "--pp", "5"),
        "error: weft bench --pp 5\n  saw: 4 layers for 5 stages",
    ),
    "no stage": ((*TINY, "--pp", "0"), "argument --pp: '0': write a whole number >= 1"),
    "cold": (
        (*TINY, *SMALL, "--temperature", "-1"),
        "argument --temperature: '-1': write a finite number >= 0",
    ),
    "no folder for the file": (
        (*TINY, "--out", "none/such/file"),
        "weft bench --out none/such/file\n  saw: there is no folder 'none/such'",
    ),
    "random weights scored": (
        (*TINY, "--eval", str(HELD_OUT)),
        "saw: random weights; --eval scores the weights and the tokenizer",
    ),
    "a seed of a score": (
        (*SCORE, "--seed", "1"),
        (
            "weft bench --seed 1\n  saw: --seed has no effect with --eval\n  instead: leave out one"
            " of the two"
        ),
    ),
    "a score within a time": (
        (*SCORE, "--max-step-seconds", "1"),
        (
            "weft bench --eval ... --max-step-seconds 1\n  saw: --eval compares scores, and a time"
            " limit makes the batches depend on the clock\n  instead: leave out one of the two"
        ),
    ),
    "no time at all": (
        (*TINY, "--max-step-seconds", "0"),
        "'0': write a number of seconds, greater than 0",
    ),
    "less time than a page needs": (
        (*TINY, *SMALL, "--max-step-seconds", "1e-9"),
        "weft bench --max-step-seconds 1e-09\n  saw: a step of one page of 16 tokens takes ",
    ),
    "a number of requests of a score": (
        (*SCORE, "--num-prompts", "1"),
        "saw: --num-prompts has no effect with --eval\n  instead: leave out one of the two",
    ),
    "a length of a score": (
        (*SCORE, "--input-len", "1"),
        "saw: --input-len has no effect with --eval",
    ),
    "no tasks": (("--model", str(DEMO), "--eval", "none.jsonl"), "there is no file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_with_its_remedy(run: Weft, case: str) -> None:
    more, text = BAD[case]
    assert_refused(run(*more), text)


def test_help_names_every_choice(run: Weft) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in (*PRESETS, *WORKLOADS, "--eval"))
