"""The command line: in this process through `main`, and as a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import weft
from weft import cli
from weft.cli import demo as demo_module
from weft.cli.demo import BOTH, EAGER, GRAPHIFIED, PIPELINED, Comparison, Way
from weft.ops.logits import SEED
from weft.stages.model import DEMO
from weft.stages.model import DTYPES as MODEL_DTYPES
from weft.transforms.generate import Completion
from weft.transforms.ladder import MODES as LADDER_MODES
from weft.transforms.runner import Runner, make_runner

Weft = Callable[..., tuple[int, str, str]]
FIELDS = [field.name for field in attrs.fields(Completion)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The model is too small for more, and other test processes want the rest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Weft:
    """`weft ARGS` in this process: its exit code, stdout and stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code: Any = cli.main(argv)
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "ids_only"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("tokenizer*", "__*"))
    return str(folder)


def generate(*more: str, model: object = DEMO) -> tuple[str, ...]:
    return ("generate", "--model", str(model), "--device", "cpu", "--dtype", "float32", "--max-tokens", "3", *more)


# generate


def test_json_is_the_completions_one_a_line_in_the_order_of_the_prompts(run: Weft) -> None:
    ids = "84,104,101"
    argv = generate("--prompt", "A list is", "--prompt-ids", ids, "--prompt", "In Python, ", "--json")
    code, out, err = run(*argv)
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [list(line) for line in lines] == [FIELDS] * 3
    model = weft.load(DEMO, "cpu", "float32")
    expected = weft.generate(model, ["A list is", [84, 104, 101], "In Python, "], max_tokens=3)
    assert [line["token_ids"] for line in lines] == [c.token_ids for c in expected]
    assert [line["text"] for line in lines] == [c.text for c in expected]
    assert [line["finish_reason"] for line in lines] == ["length"] * 3


@pytest.mark.parametrize("graph", cli.MODES)
@pytest.mark.parametrize("pp", ["1", "2"])
def test_split_and_graph_mode_change_no_token(run: Weft, graph: str, pp: str) -> None:
    prompts = ("--prompt", "A list is", "--prompt", "In Python, ", "--json", "--temperature", "0.8", "--seed", "7")
    _, plain, _ = run(*generate(*prompts, "--graph", "none"))
    code, out, _ = run(*generate(*prompts, "--graph", graph, "--pp", pp))
    assert code == 0
    for one, other in zip(out.splitlines(), plain.splitlines(), strict=True):
        assert json.loads(one)["token_ids"] == json.loads(other)["token_ids"]


@pytest.mark.parametrize("more", [(), ("--draft", str(DEMO)), ("--draft", str(DEMO), "--pp", "2")])
def test_speculation_changes_no_token(run: Weft, more: tuple[str, ...]) -> None:
    prompts = ("--prompt", "A list is", "--json", "--temperature", "0.8", "--seed", "7", "--max-tokens", "9")
    _, plain, _ = run(*generate(*prompts))
    code, out, _ = run(*generate(*prompts, "--speculate", "3", *more))
    assert code == 0
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]


def test_a_draft_model_needs_a_number_of_drafts(run: Weft) -> None:
    code, _, err = run(*generate("--prompt", "A list is", "--draft", str(DEMO)))
    assert code == 2
    assert "--draft DIR goes with --speculate K" in err


def test_a_seed_fixes_the_sample(run: Weft) -> None:
    hot = ("--prompt", "A list is", "--json", "--temperature", "5", "--max-tokens", "8")
    first, again, other = (run(*generate(*hot, "--seed", seed))[1] for seed in ("1", "1", "2"))
    assert first == again
    assert json.loads(first)["token_ids"] != json.loads(other)["token_ids"]


def test_readable_text_holds_prompt_and_completion_without_colour(run: Weft) -> None:
    code, out, err = run(*generate("--prompt", "A list is", "--prompt-ids", "84,104,101"))
    assert (code, err) == (0, "")
    model = weft.load(DEMO, "cpu", "float32")
    first, second = weft.generate(model, ["A list is", [84, 104, 101]], max_tokens=3)
    assert out == (
        f"[1 of 2] 3 tokens, length\nA list is{first.text}\n\n[2 of 2] 3 tokens, length\nThe{second.text}\n\n"
    )


def test_without_a_tokenizer_ids_are_shown(run: Weft, ids_only: str) -> None:
    argv = generate("--prompt-ids", "84, 104,101", model=ids_only)
    code, shown, _ = run(*argv)
    assert code == 0
    completion = json.loads(run(*argv, "--json")[1])
    assert completion["text"] is None
    assert shown.splitlines()[1] == ",".join(map(str, [84, 104, 101, *completion["token_ids"]]))


def test_what_could_steer_a_terminal_is_replaced() -> None:
    assert cli.printable("a\x1b[1mb\r\n\tc") == "a\N{REPLACEMENT CHARACTER}[1mb\N{REPLACEMENT CHARACTER}\n\tc"


def test_progress_goes_to_stderr_and_only_to_a_terminal(run: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, err = run(*generate("--prompt", "A list is", "--json"))
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "generate: 100%" in err


# bad input: exit code 2, the error on stderr, nothing on stdout

BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no prompt": ((), ("no prompt: give at least one --prompt TEXT or --prompt-ids 1,2,3",)),
    "empty prompt": (("--prompt", "A", "--prompt", ""), ("error: weft.generate(", "saw: prompt 1 is empty ('')")),
    "no ids": (("--prompt-ids", ""), ("saw: prompt 0 is empty ([])", "instead: give at least one token")),
    "long prompt": (
        ("--prompt", "a" * 512),
        ("saw: prompt 0 has 512 tokens; the model's limit is 512", "instead: shorten it to 511 tokens"),
    ),
    "id beyond the vocabulary": (("--prompt-ids", "1,257"), ("saw: prompt 0 holds 257", "ints from 0 to 256")),
    "words for ids": (("--prompt-ids", "1,two"), ("argument --prompt-ids: '1,two' holds 'two', which is no token id",)),
    "hole in ids": (("--prompt-ids", "1,,2"), ("'1,,2' holds ''", "write whole numbers and commas, as in 1,2,3")),
    "negative id": (("--prompt-ids=-1",), ("'-1' holds '-1', which is no token id",)),
    "prompt that is no text": (("--prompt", "\udcff"), ("argument --prompt: '\\udcff' is not valid UTF-8",)),
    "more stages than layers": (
        ("--prompt", "A", "--pp", "7"),
        ("saw: 7 stages; the model has 6 layers", "instead: from 1 stage to one a layer"),
    ),
    "no stage": (("--prompt", "A", "--pp", "0"), ("saw: 0 stages; the model has 6 layers",)),
    "unknown mode": (("--prompt", "A", "--graph", "half"), ("argument --graph: invalid choice: 'half'", "full")),
    "unknown dtype": (("--prompt", "A", "--dtype", "int4"), ("argument --dtype: invalid choice: 'int4'", "bfloat16")),
    "unknown device": (("--prompt", "A", "--device", "gpu"), ("device 'gpu', which torch does not know", "'cuda:N'")),
    "no tokens": (("--prompt", "A", "--max-tokens", "0"), ("saw: max_tokens=0", "instead: a whole number >= 1")),
    "cold": (("--prompt", "A", "--temperature", "-1"), ("saw: temperature=-1.0", "instead: a finite number >= 0")),
    "no temperature": (("--prompt", "A", "--temperature", "nan"), ("saw: temperature=nan",)),
    "no number": (("--prompt", "A", "--max-tokens", "many"), ("argument --max-tokens: invalid int value: 'many'",)),
    "an abbreviation": (("--prom", "A"), ("unrecognized arguments: --prom A",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_with_its_remedy(run: Weft, case: str) -> None:
    more, texts = BAD[case]
    _assert_refused(run(*generate(*more)), *texts)


def _assert_refused(result: tuple[int, str, str], *texts: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert "error: " in err
    assert "Traceback" not in err
    for text in texts:
        assert text in err


def test_a_missing_folder_is_named(run: Weft, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    result = run(*generate("--prompt", "A", model=missing))
    _assert_refused(result, "error: load_config(", f"saw: there is no folder {str(missing)!r}", "pass a local folder")


def test_a_truncated_checkpoint_is_named(run: Weft, ids_only: str, tmp_path: Path) -> None:
    folder = tmp_path / "truncated"
    shutil.copytree(ids_only, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    _assert_refused(run(*generate("--prompt-ids", "1", model=folder)), "model.safetensors", "is damaged", "copy")


def test_text_for_a_checkpoint_without_a_tokenizer(run: Weft, ids_only: str) -> None:
    result = run(*generate("--prompt", "A", model=ids_only))
    _assert_refused(result, "error: model.encode('A')", "holds no tokenizer.json", "instead: pass token ids")


@pytest.mark.parametrize("command", [generate("--prompt", "A"), ("demo",)], ids=["generate", "demo"])
def test_cuda_where_there_is_none(run: Weft, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _assert_refused(run(*command, "--device", "cuda"), "device 'cuda', but torch sees 0 CUDA devices", "'cpu'")


# the process


def test_help_needs_no_torch_and_names_every_choice(run: Weft) -> None:
    code, out, _ = run("generate", "--help")
    assert code == 0
    assert "{" + ",".join(LADDER_MODES) + "}" in out
    assert "{" + ",".join(MODEL_DTYPES) + "}" in out
    look = "import sys, weft.cli; weft.cli.build_parser(); sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


def test_without_a_command_the_usage_is_shown(run: Weft) -> None:
    _assert_refused(run(), "usage: weft", "COMMAND")


def test_as_a_module_in_a_process_of_its_own() -> None:
    argv = [sys.executable, "-m", "weft", *generate("--prompt", "A list is", "--prompt-ids", "84", "--json")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert [list(json.loads(line)) for line in done.stdout.splitlines()] == [FIELDS] * 2


def test_a_terminal_without_the_letters_is_no_failure() -> None:
    look = "import weft.cli as c; c._doctor = lambda _: print('\\xe9') or 0; c.main(['doctor'])"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xe9\n", "")


def test_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "weft", "--version"]
    # argparse itself swallows the error of an unbuffered write.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=env)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_is_quiet(run: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.cli.generate.load", interrupt)
    assert run(*generate("--prompt", "A")) == (130, "", "")


# doctor


def test_doctor_says_versions_devices_graphs_and_ops(run: Weft) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    for row in (["weft", weft.__version__], ["torch", torch.__version__], ["flashinfer", "not", "installed"]):
        if row[0] != "flashinfer" or not _installed("flashinfer"):
            assert row in lines
    assert any(line[:2] == ["cpu", "tape"] for line in lines)
    assert any(line[:3] == ["cpu", "paged_attention", "reference"] for line in lines)


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def test_doctor_as_json(run: Weft) -> None:
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert list(report) == ["versions", "devices", "graph_backends", "ops"]
    cpu, *gpus = report["devices"]
    assert (cpu["device"], cpu["threads"]) == ("cpu", 1)
    assert len(gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert {op["device"] for op in report["ops"]} == {device["device"] for device in report["devices"]}
    assert all(op["reason"] for op in report["ops"])
    assert ("tape", "cpu") in {(b["backend"], b["device"]) for b in report["graph_backends"]}


def test_doctor_says_why_cuda_graphs_are_not_used(run: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    reports = json.loads(run("doctor", "--json")[1])["graph_backends"]
    why = "torch is built for CUDA 99.9, but finds no device or no driver"
    assert reports[1] == {"backend": "cuda", "device": None, "reason": why}


# demo


def test_demo_shows_that_all_four_ways_are_equal(run: Weft) -> None:
    code, out, err = run("demo", "--device", "cpu", "--max-tokens", "5")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    for prompt in demo_module.PROMPTS:
        assert out.count(prompt.strip()) == 1
    counts = {row[0]: row[2:] for row in rows if len(row) == 5 and row[0] in {way.name for way in demo_module.WAYS}}
    assert counts == {
        "eager": ["0", "0", "5"],
        "graphified": ["1", "4", "1"],
        "pipelined": ["0", "0", "20"],
        "both": ["4", "16", "4"],
    }
    assert [row[-1] for row in rows if row[1:2] in (["eager"], ["pipelined"])] == ["holds"] * 4
    assert "EQUAL after each of 5 steps: identical tokens" in " ".join(out.split())


def _plant(monkeypatch: pytest.MonkeyPatch, victim: Way, damage: Callable[[Any, Any], None]) -> None:
    """Let the third step that `victim` runs return a state, or an output, that `damage` changed."""

    def planted(model: Any, limits: Any, **options: Any) -> Runner:
        runner = make_runner(model, limits, **options)
        calls: list[Any] = []
        if (options["num_stages"], options["mode"]) != (victim.num_stages, victim.mode):
            return runner

        def step(params: Any, state: Any, batch: Any) -> Any:
            state, out = runner.step(params, state, batch)
            calls.append(batch)
            if len(calls) == 3:
                damage(state, out)
            return state, out

        return attrs.evolve(runner, step=step)

    monkeypatch.setattr(demo_module, "make_runner", planted)


def _damage_pages(state: Any, _: Any) -> None:
    state[-1].kv_pages[-1, 0, -1] += 1e-3  # a page that no step reads before the run ends: no token shows it


def _damage_table(state: Any, _: Any) -> None:
    state[-1].sampling.ints[0, SEED] += 1  # greedy sampling does not read it


def _damage_token(state: Any, _: Any) -> None:
    for stage in state:
        stage.last_tokens[0] = 0


def _damage_logits(_: Any, out: Any) -> None:
    out.logits[0, 0] = float("nan")


PLANTED: dict[str, tuple[Way, Callable[[Any, Any], None], str]] = {
    "pages": (GRAPHIFIED, _damage_pages, "graphified against eager: the KV pages differ by 1.0e-03, allowed 0"),
    "pages of stage 1": (BOTH, _damage_pages, "both against pipelined: the KV pages differ by 1.0e-03, allowed 0"),
    "table of stage 1": (PIPELINED, _damage_table, "pipelined against eager: a stage's request table differs"),
    "token": (GRAPHIFIED, _damage_token, "graphified against eager: the tokens differ in step 4, the last"),
    "NaN": (GRAPHIFIED, _damage_logits, "graphified against eager: the logits differ by nan, allowed 0"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_demo_finds_a_planted_difference(run: Weft, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    victim, damage, text = PLANTED[case]
    _plant(monkeypatch, victim, damage)
    code, out, err = run("demo", "--device", "cpu", "--max-tokens", "6")
    assert (code, err) == (1, "")
    shown = " ".join(out.split())
    assert text in shown
    assert "NOT EQUAL: the four ways did not compute the same." in shown
    assert "EQUAL after each" not in shown


def test_demo_refuses_more_tokens_than_the_model_has_positions(run: Weft) -> None:
    most = 512 - len("The function returns")
    for count in ("0", str(most + 1)):
        result = run("demo", "--device", "cpu", "--max-tokens", count)
        _assert_refused(result, f"error: weft demo --max-tokens {count}", f"instead: a number from 1 to {most}")


def test_demo_leaves_the_number_of_threads_as_it_was(run: Weft) -> None:
    torch.set_num_threads(2)
    assert run("demo", "--device", "cpu", "--max-tokens", "1")[0] == 0
    assert torch.get_num_threads() == 2


def test_a_nan_holds_nowhere() -> None:
    same = Comparison(BOTH, EAGER, 1, tokens=True, logits=0.0, kv_pages=0.0, tables=True, bitwise=True, exact=False)
    assert same.holds
    assert not attrs.evolve(same, logits=float("nan")).holds
    assert not attrs.evolve(same, exact=True, bitwise=False).holds


# ranks of its own


def test_stages_in_processes_of_their_own_say_what_one_process_says(run: Weft) -> None:
    options = ("--prompt", "A list", "--prompt", "The function", "--max-tokens", "5", "--json")

    def said(*more: str) -> list[tuple[str, list[int]]]:
        code, out, _ = run(*generate(*options, *more))
        assert code == 0
        return [(line["text"], line["token_ids"]) for line in map(json.loads, out.splitlines())]

    alone = said()
    assert len(alone) == 2
    assert said("--pp", "2") == alone
    assert said("--pp", "2", "--transport", "local") == alone
    assert said("--pp", "3", "--transport", "threads") == alone


def test_what_a_rank_refuses_is_said_once(run: Weft) -> None:
    code, out, err = run(*generate("--prompt", "A", "--pp", "2", "--transport", "nccl", "--device", "cpu"))
    assert (code, out) == (2, "")
    assert err.count("backend='nccl' for a device of type cpu") == 1


def test_one_stage_has_nobody_to_send_to(run: Weft) -> None:
    code, _, err = run(*generate("--prompt", "A", "--pp", "1", "--transport", "gloo"))
    assert code == 2
    assert "weft generate --transport gloo\n  saw: one stage, which sends nothing by gloo" in err


def test_under_torchrun_the_first_rank_speaks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "weft"]
    options = generate("--prompt", "A list", "--max-tokens", "5", "--device", "cpu", "--json")
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = done.stdout.splitlines()
    assert len(json.loads(line)["token_ids"]) == 5
    wrong = subprocess.run([*command, *options, "--pp", "3"], capture_output=True, text=True, timeout=200)
    assert "saw: --pp 3 under torchrun with 2 processes" in wrong.stderr
