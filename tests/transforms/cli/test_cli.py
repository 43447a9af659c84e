"""The command line, through `main` in this process, and in a new process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from cli_calls import Weft, assert_refused

import weft
from weft.errors import ConfigError, RequestError
from weft.ops.attention.backends import BACKENDS
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.choices import DTYPES as MODEL_DTYPES
from weft.transforms.cli.flags import ATTENTION
from weft.transforms.cli.main import in_flags
from weft.transforms.cli.options import Generate, RunOptions
from weft.transforms.cli.printing import printable
from weft.transforms.cli.ranks import Here, in_ranks
from weft.transforms.engine.generate import Completion
from weft.transforms.graphs.ladder import MODES
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.threads import Threads

FIELDS = [
    field.name for field in attrs.fields(Completion) if field.name not in ("times", "provenance")
]


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "ids_only"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("tokenizer*", "__*"))
    return str(folder)


def generate(*more: str, model: object = DEMO) -> tuple[str, ...]:
    return (
        "generate",
        "--model",
        str(model),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--max-tokens",
        "3",
        *more,
    )


# generate


def test_json_is_the_completions_one_a_line_in_the_order_of_the_prompts(run: Weft) -> None:
    ids = "84,104,101"
    argv = generate(
        "--prompt", "A list is", "--prompt-ids", ids, "--prompt", "In Python, ", "--json"
    )
    code, out, err = run(*argv)
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [list(line) for line in lines] == [FIELDS] * 3
    model = weft.load(DEMO, "cpu", "float32")
    expected = weft.generate(model, ["A list is", [84, 104, 101], "In Python, "], max_tokens=3)
    assert [line["token_ids"] for line in lines] == [c.token_ids for c in expected]
    assert [line["text"] for line in lines] == [c.text for c in expected]
    assert [line["finish_reason"] for line in lines] == ["length"] * 3


@pytest.mark.one_of(5)
@pytest.mark.parametrize("graph", MODES)
@pytest.mark.parametrize("pp", ["1", "2"])
def test_split_and_graph_mode_change_no_token(run: Weft, graph: str, pp: str) -> None:
    prompts = (
        "--prompt",
        "A list is",
        "--prompt",
        "In Python, ",
        "--json",
        "--temperature",
        "0.8",
        "--seed",
        "7",
    )
    _, plain, _ = run(*generate(*prompts, "--graph", "none"))
    code, out, _ = run(*generate(*prompts, "--graph", graph, "--pp", pp))
    assert code == 0
    for one, other in zip(out.splitlines(), plain.splitlines(), strict=True):
        assert json.loads(one)["token_ids"] == json.loads(other)["token_ids"]


@pytest.mark.slow
def test_a_compiler_changes_no_token(run: Weft) -> None:
    prompt = ("--prompt", "A list is", "--json", "--max-tokens", "9")
    _, plain, _ = run(*generate(*prompt))
    code, out, err = run(*generate(*prompt, "--graph", "full", "--compiler", "aot_eager"))
    assert (code, err) == (0, "")
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]


@pytest.mark.parametrize("more", [(), ("--draft", str(DEMO)), ("--draft", str(DEMO), "--pp", "2")])
def test_speculation_changes_no_token(run: Weft, more: tuple[str, ...]) -> None:
    prompts = (
        "--prompt",
        "A list is",
        "--json",
        "--temperature",
        "0.8",
        "--seed",
        "7",
        "--max-tokens",
        "9",
    )
    _, plain, _ = run(*generate(*prompts))
    code, out, _ = run(*generate(*prompts, "--speculate", "3", *more))
    assert code == 0
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]


def test_a_draft_model_needs_a_number_of_drafts(run: Weft) -> None:
    result = run(*generate("--prompt", "A list is", "--draft", str(DEMO)))
    assert_refused(
        result,
        f"error: weft generate --draft {DEMO}",
        "saw: no --speculate",
        "--draft DIR --speculate K",
    )


def test_a_seed_fixes_the_sample(run: Weft) -> None:
    hot = ("--prompt", "A list is", "--json", "--temperature", "5", "--max-tokens", "8")
    first, again, other = (run(*generate(*hot, "--seed", seed))[1] for seed in ("1", "1", "2"))
    assert first == again
    assert json.loads(first)["token_ids"] != json.loads(other)["token_ids"]


SAMPLING: dict[str, tuple[list[str], dict[str, Any]]] = {
    "top_k": (["--top-k", "2"], {"top_k": 2}),
    "vLLM's top_k of all": (["--top-k", "-1"], {"top_k": -1}),
    "top_p": (["--top-p", "0.3"], {"top_p": 0.3}),
    "min_p": (["--min-p", "0.5"], {"min_p": 0.5}),
    "stop": (["--stop", "e", "--stop", "a"], {"stop": ["e", "a"]}),
    "min_tokens": (["--min-tokens", "2", "--stop", "e"], {"min_tokens": 2, "stop": "e"}),
    "ignore_eos": (["--ignore-eos"], {"ignore_eos": True}),
    "penalties": (
        [
            *("--repetition-penalty", "1.5"),
            *("--presence-penalty", "2"),
            *("--frequency-penalty", "-1.5"),
        ],
        {"repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": -1.5},
    ),
}


# The sampling parameters that are not flags of `weft generate`.
IN_PYTHON = {
    "allowed_token_ids",
    "bad_token_ids",
    "bad_words",
    "detokenize",
    "include_stop_str_in_output",
    "logit_bias",
    "logprobs",
    "n",
    "prompt_logprobs",
    "skip_special_tokens",
    "stop_token_ids",
}


def test_every_sampling_parameter_is_a_flag_or_left_to_python() -> None:
    names = {field.name for field in attrs.fields(weft.SamplingParams)}
    flags = {field.name for field in attrs.fields(Generate)}
    assert names - flags == IN_PYTHON


@pytest.mark.one_of(4)
@pytest.mark.parametrize("case", SAMPLING)
def test_flags_of_sampling_are_its_arguments(run: Weft, case: str) -> None:
    flags, arguments = SAMPLING[case]
    always = ["--prompt", "A list is", "--temperature", "2", "--seed", "5", "--max-tokens", "24"]
    code, out, err = run(*generate(*always, *flags, "--json"))
    assert (code, err) == (0, "")
    [expected] = weft.generate(
        weft.load(DEMO, "cpu", "float32"),
        ["A list is"],
        max_tokens=24,
        seed=5,
        sampling=weft.SamplingParams(temperature=2.0, **arguments),
    )
    line = json.loads(out)
    assert line["token_ids"] == expected.token_ids
    assert (line["text"], line["stop_reason"]) == (expected.text, expected.stop_reason)


def test_the_help_of_a_flag_of_sampling_is_that_of_the_argument(run: Weft) -> None:
    _, out, _ = run("generate", "--help")
    text = " ".join(out.split())
    assert "--stop TEXT texts that end the request; the one that begins first" in text
    assert "(and those that tie with the last); 0 and -1: all (default 0)" in text


def test_readable_text_holds_prompt_and_completion_without_colour(run: Weft) -> None:
    code, out, err = run(*generate("--prompt", "A list is", "--prompt-ids", "84,104,101"))
    assert (code, err) == (0, "")
    model = weft.load(DEMO, "cpu", "float32")
    first, second = weft.generate(model, ["A list is", [84, 104, 101]], max_tokens=3)
    assert (
        out == f"[1 of 2] 3 tokens, length\nA list is{first.text}\n\n[2 of 2] 3 tokens,"
        f" length\nThe{second.text}\n\n"
    )


def test_without_a_tokenizer_ids_are_shown(run: Weft, ids_only: str) -> None:
    argv = generate("--prompt-ids", "84, 104,101", model=ids_only)
    code, shown, _ = run(*argv)
    assert code == 0
    completion = json.loads(run(*argv, "--json")[1])
    assert completion["text"] is None
    assert shown.splitlines()[1] == ",".join(map(str, [84, 104, 101, *completion["token_ids"]]))


def test_an_error_speaks_of_the_command_and_its_flags() -> None:
    error = RequestError(
        "Engine(model, limits)",
        "max_num_reqs=4, num_pages=2, num_cohorts=1",
        "max_num_reqs=2 or fewer",
    )
    assert (
        in_flags(error, ["bench", "--preset", "tiny", "--out", "a b"])
        == "weft bench --preset tiny --out 'a b'\n"
        "  saw: --max-num-seqs 4, --num-pages 2, num_cohorts=1\n"
        "  instead: --max-num-seqs 2 or fewer"
    )
    only = RequestError("predict(config, 2, cohorts=5)", "5 cohorts", "1")
    assert in_flags(only, ["plan", "--pp", "2"]).startswith("weft plan --cohorts 5\n")
    quoted = RequestError("model.encode('a seed=5')", "no tokenizer", "ids")
    assert in_flags(quoted, ["generate", "--model", "m"]).startswith("weft generate --model m\n")
    written = ConfigError(
        "--model m", "config.json has dtype='x'", "use a model with dtype='float32'"
    )
    assert in_flags(written, ["plan", "--model", "m"]) == str(written)


def test_what_could_steer_a_terminal_is_replaced() -> None:
    assert (
        printable("a\x1b[1mb\r\n\tc")
        == "a\N{REPLACEMENT CHARACTER}[1mb\N{REPLACEMENT CHARACTER}\n\tc"
    )


def test_progress_goes_to_stderr_and_only_to_a_terminal(
    run: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, err = run(*generate("--prompt", "A list is", "--json"))
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "generate: 100%" in err


# bad input: exit code 2, the error on stderr, nothing on stdout

BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no prompt": (
        (),
        ("saw: no prompt", "instead: give at least one --prompt TEXT or --prompt-ids 1,2,3"),
    ),
    "empty prompt": (
        ("--prompt", "A", "--prompt", ""),
        ("argument --prompt: '' is empty: write at least one letter",),
    ),
    "no ids": (
        ("--prompt-ids", ""),
        ("argument --prompt-ids: '' holds '', which is not a token id",),
    ),
    "long prompt": (
        ("--prompt", "a" * 512),
        (
            "saw: prompt 0 has 512 tokens; the model's limit is 512",
            "instead: a prompt of 1 to 511 tokens",
        ),
    ),
    "long completion": (
        ("--prompt", "a" * 500, "--prompt", "b", "--max-tokens", "13"),
        (
            "--max-tokens 13\n  saw: 13 tokens after a prompt of 500; the model's limit is 512",
            "--max-tokens 12, or fewer",
        ),
    ),
    "id beyond the vocabulary": (
        ("--prompt-ids", "1,257"),
        ("saw: prompt 0 holds 257", "ints from 0 to 256"),
    ),
    "words for ids": (
        ("--prompt-ids", "1,two"),
        ("argument --prompt-ids: '1,two' holds 'two', which is not a token id",),
    ),
    "hole in ids": (
        ("--prompt-ids", "1,,2"),
        ("'1,,2' holds ''", "write whole numbers and commas, as in 1,2,3"),
    ),
    "negative id": (("--prompt-ids=-1",), ("'-1' holds '-1', which is not a token id",)),
    "prompt that is no text": (
        ("--prompt", "\udcff"),
        ("argument --prompt: '\\udcff' is not valid UTF-8",),
    ),
    "more stages than layers": (
        ("--prompt", "A", "--pp", "7"),
        ("error: weft generate --pp 7\n  saw: 6 layers for 7 stages", "instead: use 1 to 6 stages"),
    ),
    "no stage": (
        ("--prompt", "A", "--pp", "0"),
        ("argument --pp: '0': write a whole number from 1",),
    ),
    "unknown mode": (
        ("--prompt", "A", "--graph", "half"),
        ("argument --graph: invalid choice: 'half'", "full"),
    ),
    "unknown dtype": (
        ("--prompt", "A", "--dtype", "int4"),
        ("argument --dtype: invalid choice: 'int4'", "bfloat16"),
    ),
    "unknown device": (
        ("--prompt", "A", "--device", "gpu"),
        ("device 'gpu', which torch does not know", "'cuda:N'"),
    ),
    "no tokens": (
        ("--prompt", "A", "--max-tokens", "0"),
        ("argument --max-tokens: '0': write a whole number from 1",),
    ),
    "cold": (
        ("--prompt", "A", "--temperature", "-1"),
        ("argument --temperature: '-1': write a finite number >= 0",),
    ),
    "no temperature": (
        ("--prompt", "A", "--temperature", "nan"),
        ("argument --temperature: 'nan': write a finite number >= 0",),
    ),
    "no number": (
        ("--prompt", "A", "--max-tokens", "many"),
        ("argument --max-tokens: 'many': write a whole number",),
    ),
    "no time": (
        ("--prompt", "A", "--timeout", "0"),
        ("argument --timeout: '0': write a number of seconds",),
    ),
    "no number of seconds": (
        ("--prompt", "A", "--timeout", "inf"),
        ("argument --timeout: 'inf'", "as in 30"),
    ),
    "more seconds than a clock has": (
        ("--prompt", "A", "--timeout", "1e18"),
        ("argument --timeout: '1e18'",),
    ),
    "an abbreviation": (("--prom", "A"), ("unrecognized arguments: --prom A",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_with_its_remedy(run: Weft, case: str) -> None:
    more, texts = BAD[case]
    assert_refused(run(*generate(*more)), *texts)


def test_a_number_that_no_prompt_leaves_room_for_is_refused_before_weights_are_read(
    run: Weft, folder: str
) -> None:
    result = run(*generate("--prompt", "A", "--max-tokens", "4096", model=folder))
    assert_refused(
        result, "saw: 4096 tokens after a prompt of 1 or more; the model's limit is 4096 together"
    )


def test_a_missing_folder_is_named(run: Weft, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    result = run(*generate("--prompt", "A", model=missing))
    assert_refused(
        result,
        f"error: --model {missing}",
        f"saw: there is no folder {str(missing)!r}",
        "pass a local folder",
    )


def test_a_truncated_checkpoint_is_named(run: Weft, ids_only: str, tmp_path: Path) -> None:
    folder = tmp_path / "truncated"
    shutil.copytree(ids_only, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert_refused(
        run(*generate("--prompt-ids", "1", model=folder)), "model.safetensors", "is damaged", "copy"
    )


def test_text_for_a_checkpoint_without_a_tokenizer(run: Weft, ids_only: str) -> None:
    result = run(*generate("--prompt", "A", model=ids_only))
    assert_refused(
        result, "error: weft generate --model", "holds no tokenizer.json", "instead: pass token ids"
    )


@pytest.mark.parametrize(
    "command", [generate("--prompt", "A"), ("demo",)], ids=["generate", "demo"]
)
def test_cuda_where_there_is_none(
    run: Weft, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(
        run(*command, "--device", "cuda"), "device 'cuda', but torch sees 0 CUDA devices", "'cpu'"
    )


@pytest.mark.slow
def test_a_torch_for_cuda_without_a_driver() -> None:
    commands = (
        ("doctor",),
        ("generate", "--model", str(DEMO), "--prompt", "A", "--max-tokens", "3", "--pp", "1"),
    )
    look = (
        "import no_driver; from weft.transforms.cli.main import main; raise"
        f" SystemExit(any(map(main, {commands})))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=False, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch is built for CUDA" in done.stdout


# the process


def test_help_needs_no_torch_and_names_every_choice(run: Weft) -> None:
    code, out, _ = run("generate", "--help")
    assert code == 0
    assert "{" + ",".join(MODES) + "}" in out
    assert "{" + ",".join(MODEL_DTYPES) + "}" in out
    assert ("auto", *BACKENDS) == ATTENTION
    look = "import sys; from weft.transforms.cli.main import build_parser; build_parser(); "
    look += "sys.exit(bool({'torch', 'rich', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


def test_without_a_command_the_usage_is_shown(run: Weft) -> None:
    assert_refused(run(), "usage: weft", "COMMAND")


@pytest.mark.slow
def test_as_a_module_in_a_process_of_its_own() -> None:
    argv = [
        sys.executable,
        "-m",
        "weft",
        *generate("--prompt", "A list is", "--prompt-ids", "84", "--json"),
    ]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [list(json.loads(line)) for line in done.stdout.splitlines()] == [FIELDS] * 2


@pytest.mark.slow
def test_a_terminal_without_the_letters_is_no_failure() -> None:
    look = (
        "import weft.transforms.cli.main as m; m.run_command = lambda _: print('\\xe9') or 0;"
        " m.main(['doctor'])"
    )
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=False, env=env
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xe9\n", "")


@pytest.mark.slow
def test_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "weft", "--version"]
    # argparse itself swallows the error of an unbuffered write.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        argv, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=env
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_is_quiet(run: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.transforms.cli.ranks.load", interrupt)
    assert run(*generate("--prompt", "A")) == (130, "", "")


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
    code, out, err = run(
        *generate("--prompt", "A", "--pp", "2", "--transport", "nccl", "--device", "cpu")
    )
    assert (code, out) == (2, "")
    assert err.count("saw: stages on the CPU, which nccl does not connect") == 1


def test_one_stage_has_nobody_to_send_to(run: Weft) -> None:
    code, _, err = run(*generate("--prompt", "A", "--pp", "1", "--transport", "gloo"))
    assert code == 2
    assert "weft generate --transport gloo\n  saw: one stage, which sends nothing by gloo" in err


RANKS: dict[str, tuple[tuple[str, ...], str]] = {
    "one GPU for two ranks": (("--device", "cuda:1"), "saw: one GPU for several processes"),
    "gloo between GPUs": (
        ("--transport", "gloo"),
        "saw: stages on GPUs, which gloo does not connect",
    ),
    "few GPUs": (("--pp", "3"), "saw: 2 GPUs for 3 stages"),
}


@pytest.mark.parametrize("case", RANKS)
def test_ranks_that_cannot_share_the_gpus(
    run: Weft, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    more, said = RANKS[case]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert_refused(run("generate", "--model", str(DEMO), "--prompt", "A", "--pp", "2", *more), said)


def test_a_transport_within_a_process_is_refused_under_torchrun(
    run: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    result = run(*generate("--prompt", "A", "--transport", "local"))
    assert_refused(result, "error: weft generate --transport local", "saw: 2 processes of torchrun")


def test_processes_of_torchrun_beyond_the_layers(
    run: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "9")):
        monkeypatch.setenv(name, value)
    result = run(*generate("--prompt", "A"))
    assert_refused(
        result, "error: weft generate under torchrun with 9 processes", "saw: 6 layers for 9 stages"
    )


@pytest.mark.nightly
def test_under_torchrun_the_first_rank_speaks() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "weft",
    ]
    options = generate("--prompt", "A list", "--max-tokens", "5", "--device", "cpu", "--json")
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = done.stdout.splitlines()
    assert len(json.loads(line)["token_ids"]) == 5
    wrong = subprocess.run(
        [*command, *options, "--pp", "3"], capture_output=True, text=True, timeout=200
    )
    assert "saw: --pp 3 under torchrun with 2 processes" in wrong.stderr


def time_out(here: Here) -> float:
    assert isinstance(here.transport, Distributed | Threads)
    return here.transport.timeout


@pytest.mark.parametrize("transport", ["gloo", "threads"])
def test_an_option_says_how_long_a_stage_may_keep_others_waiting(transport: str) -> None:
    options = Generate(model=str(DEMO), pp=2, transport=transport, device="cpu", timeout=7.5)
    assert in_ranks(time_out, options) == 7.5


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_the_time_out_is_an_option(
    run: Weft, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    places: list[RunOptions] = []

    def note(fn: object, place: RunOptions, *_: object) -> None:
        places.append(place)
        sys.exit(0)

    monkeypatch.setattr(f"weft.transforms.cli.{command}.in_ranks", note)
    argv = generate("--prompt", "A") if command == "generate" else ("bench", "--preset", "tiny")
    assert run(*argv, "--timeout", "7.5")[0] == 0
    assert run(*argv)[0] == 0
    assert [place.timeout for place in places] == [7.5, 30.0]


# code in a checkpoint


def test_fields_that_weft_does_not_know_are_one_line(run: Weft, tmp_path: Path) -> None:
    """One warning, although the command and its ranks read them several times."""
    folder = shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("__*"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "my_field": 3}
    (folder / "config.json").write_text(json.dumps(config))
    line = (
        "warning: weft does not know these fields of config.json, and ignores them: "
        "auto_map={'AutoModelForCausalLM': 'modeling.Model'}, my_field=3\n"
    )
    for more in ((), ("--pp", "2")):
        code, out, err = run(*generate("--prompt", "A list is", "--json", *more, model=folder))
        assert (code, len(out.splitlines()), err) == (0, 1, line)
