"""`weft plan`: its predictions against arithmetic by hand, and its output."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_calls import Weft, assert_refused

from weft.display.durations import duration
from weft.effects import Send, parse_listing
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.params import num_bytes
from weft.transforms.pipelines.checker import check


@pytest.fixture
def run(run: Weft) -> Weft:
    """The output of `weft plan ARGS`."""
    return partial(run, "plan")


LAYER = 2 * (2 * 64 + 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128)
HEAD = 2 * (2304 * 64 + 64)
KV = 2 * 2 * 16 * 2
ROW = 64 * 2
SAMPLING = 26  # bytes that could be read while a logit is drawn from


def predicted(run: Weft, folder: str, *more: str) -> Any:
    code, out, err = run("--model", folder, "--bandwidth", "1", "--json", *more)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_one_stage_is_predicted_unless_another_number_is_given(run: Weft, folder: str) -> None:
    assert predicted(run, folder) == predicted(run, folder, "--pp", "1")
    assert predicted(run, folder, "--tp", "2")["wanted"]["shards"] == 2


def test_the_bytes_are_those_of_the_shapes(run: Weft, folder: str) -> None:
    model_report = predicted(run, folder, "--pp", "2")["model"]
    assert model_report["bytes"] == {
        "layer": LAYER,
        "head": HEAD,
        "embedding": ROW,
        "kv": KV,
        "message": ROW,
    }
    assert (model_report["architecture"], model_report["num_layers"], model_report["dtype"]) == (
        "LlamaForCausalLM",
        8,
        "bfloat16",
    )


def test_experts_cost_what_the_tokens_touch(run: Weft, tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 384,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "vocab_size": 256,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = (512 * 256 + 256 * 256) + 4 * (4 * 2 + 2 * 2) + 2 * (2 * 256 + 2 * 128)
    experts = 4 * (3 * 128 * 256 + 4 * 3 * 2)
    dense = attention + 3 * 384 * 256 + 4 * 3 * 3 * 2
    sparse = attention + 2 * 4 * 256
    report = predicted(
        run, str(tmp_path), "--pp", "3", "--requests", "2", "--cohorts", "1", "--context", "0"
    )
    assert report["model"]["bytes"]["layer"] == max(sparse + experts, dense)
    touched = sparse + experts * (1 - 0.75**2)
    seconds = [stage["seconds"] for stage in report["splits"]["even"]]
    last = touched + 512 + 256 * 512 + 2 * 256 * SAMPLING
    assert seconds == pytest.approx([(touched + 2 * 512) / 1e9, dense / 1e9, last / 1e9])


def test_the_bytes_are_those_of_a_checkpoint(run: Weft) -> None:
    sizes = predicted(run, str(DEMO), "--pp", "1")["model"]["bytes"]
    model = load(DEMO, "cpu", "bfloat16")
    params = model.params
    assert model.config.tie_word_embeddings
    assert num_bytes(params) == 6 * sizes["layer"] + sizes["head"]


def test_a_stage_costs_its_bytes_over_the_bandwidth(run: Weft, folder: str) -> None:
    report = predicted(
        run, folder, "--pp", "2", "--requests", "12", "--cohorts", "3", "--context", "100"
    )
    layer = LAYER + 4 * 100 * KV
    embedding = 4 * ROW
    sampling = 4 * 2304 * SAMPLING
    for name, sizes in (("balanced", (6, 2)), ("even", (4, 4))):
        split = report["splits"][name]
        assert tuple(stage["stop"] - stage["start"] for stage in split) == sizes
        expected = [
            (sizes[0] * layer + embedding) / 1e9,
            (sizes[1] * layer + HEAD + sampling) / 1e9,
        ]
        assert [stage["seconds"] for stage in split] == pytest.approx(expected)


def test_the_prediction_is_that_of_the_slowest_stage(run: Weft, folder: str) -> None:
    report = predicted(run, folder, "--pp", "2", "--requests", "12", "--cohorts", "3")
    seconds = [stage["seconds"] for stage in report["splits"]["balanced"]]
    assert report["predicted"]["step_time"] == pytest.approx(3 * max(seconds))
    assert report["predicted"]["tokens_per_second"] == pytest.approx(12 / (3 * max(seconds)))
    assert report["predicted"]["bubbles"] == pytest.approx(
        [1 - one / max(seconds) for one in seconds]
    )
    assert report["costs"] == "bytes over bandwidth, not measured"


def test_transfers_cost_what_the_options_say(run: Weft, folder: str) -> None:
    options = (
        "--pp",
        "2",
        "--requests",
        "2",
        "--cohorts",
        "1",
        "--steps",
        "1",
        "--link",
        "0.5",
        "--latency",
        "30",
    )
    report = predicted(run, folder, *options)
    seconds = [stage["seconds"] for stage in report["splits"]["balanced"]]
    transfers = 2 * 30e-6 + (2 * ROW + 2 * 12) / 0.5e9
    assert report["timeline"]["step_time"] == pytest.approx(sum(seconds) + transfers)
    assert report["timeline"]["peak_bytes"] == [2 * ROW] * 2


def test_the_default_number_of_cohorts_is_the_best_of_the_table(run: Weft, folder: str) -> None:
    report = predicted(run, folder, "--pp", "3", "--requests", "64")
    assert [row["cohorts"] for row in report["cohorts"]] == [1, 2, 3, 4, 5, 6]
    best = max(report["cohorts"], key=lambda row: row["tokens_per_second"])
    assert report["predicted"] == {name: value for name, value in best.items() if name != "bubble"}
    nine_cohorts = predicted(run, folder, "--pp", "3", "--requests", "64", "--cohorts", "9")
    assert [row["cohorts"] for row in nine_cohorts["cohorts"]] == [1, 2, 3, 4, 5, 6, 9]
    assert (nine_cohorts["predicted"]["cohorts"], nine_cohorts["best"]) == (9, report["best"])


def test_the_programs_parse_and_pass_their_check(run: Weft, folder: str) -> None:
    report = predicted(run, folder, "--pp", "4", "--cohorts", "2", "--steps", "3")
    programs = parse_listing("\n".join(report["programs"]))
    check(programs)
    ran = [(e["rank"], e["effect"]) for e in report["timeline"]["events"]]
    assert ran == [(p.rank, str(e)) for p in programs for e in p.effects]


def test_the_text_is_for_reading(run: Weft, folder: str) -> None:
    code, out, err = run(
        "--model", folder, "--pp", "2", "--requests", "12", "--cohorts", "3", "--bandwidth", "1"
    )
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for part in (
        "bubbles: stage 0 ",
        "Predicted from bytes over bandwidth, not measured: ",
        "LlamaForCausalLM, 8 layers, bfloat16, in 2 stages\n",
        "weights: 74 kB per layer; the head 295 kB, on the last stage",
        "KV cache: 131 kB per request and layer, for 1024 tokens of context",
        "GPU memory of stage 1: weights ",
        "memory bandwidth: 1 GB/s\na transfer takes no time; an edge holds 2 messages",
        "split of the layers, for a cohort of 4\n",
        "cohorts  of requests     step  tokens/s  bubble",
        "timeline of 2 steps of each of 3 cohorts, from an empty pipeline\n",
        "    ms |0 ",
        "rank 1 ...",
    ):
        assert part in out
    places = [
        out.index(part)
        for part in ("prediction\n", "assumptions\n", "split of", "numbers of", "timeline of")
    ]
    assert places == sorted(places)
    assert places[0] == 0
    assert "run stage" not in out


def test_programs_are_printed_when_asked_for(run: Weft, folder: str) -> None:
    """The first rank of each stage stands for those that share it; the ranks count all of them."""
    code, out, _ = run("--model", folder, "--pp", "3", "--tp", "2", "--requests", "6", "--programs")
    assert code == 0
    assert "\nRank N stands for the 2 ranks of stage N, which run alike.\n" in out
    _, text = out.split("programs of this timeline, of the first rank of each stage\n")
    programs = parse_listing(text)
    assert [(one.rank, one.num_ranks) for one in programs] == [(0, 6), (2, 6), (4, 6)]
    assert [
        {effect.to for effect in one.effects if isinstance(effect, Send)} for one in programs
    ] == [{2}, {4}, set()]


def test_the_answer_is_the_figures_of_the_report(run: Weft, folder: str) -> None:
    options = (
        "--model",
        folder,
        "--pp",
        "2",
        "--requests",
        "12",
        "--cohorts",
        "3",
        "--bandwidth",
        "1",
    )
    prediction = predicted(run, folder, *options[2:])["predicted"]
    first, second, third, *_ = run(*options)[1].splitlines()[1:]
    assert first == f"{prediction['tokens_per_second']:,.0f} tokens/s from 12 requests"
    assert second == f"a step takes {duration(prediction['step_time'])}, with 3 cohorts of 4"
    assert third.startswith("bound by memory bandwidth: stage ")


BOUND: dict[str, tuple[tuple[str, ...], str]] = {
    "weights": (
        ("--cohorts", "2", "--context", "0", "--requests", "2"),
        "bound by memory bandwidth: stage 1, 100% weights and 0% KV cache",
    ),
    "kernels": (("--cohorts", "2", "--kernel", "100"), "bound by kernels: 4.4 ms of the "),
    "one cohort": (
        ("--cohorts", "1"),
        "bound by the way of a cohort through all stages: ranks wait for it",
    ),
    "slow transfers": (
        ("--latency", "1e6"),
        "bound by transfers: a message takes 1 s, the slowest stage ",
    ),
    "a thin link": (("--link", "1e-6"), "bound by transfers: a message takes "),
}


@pytest.mark.parametrize("case", BOUND)
def test_what_bounds_it(run: Weft, folder: str, case: str) -> None:
    more, said = BOUND[case]
    code, out, _ = run("--model", folder, "--pp", "2", *more)
    assert (code, out.splitlines()[3].startswith(said)) == (0, True), out.splitlines()[3]


def test_the_picture_is_written_beside(run: Weft, folder: str, tmp_path: Path) -> None:
    alone = run("--model", folder, "--pp", "2")
    assert run("--model", folder, "--pp", "2", "--svg", str(tmp_path / "plan.svg")) == alone
    svg = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    ranks = [
        node.text
        for node in ElementTree.fromstring(svg).iter()
        if (node.text or "").startswith("rank ")
    ]
    assert ranks[:2] == ["rank 0", "rank 1"]


def test_a_picture_that_cannot_be_written_says_where(
    run: Weft, folder: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "nowhere" / "plan.svg")
    code, out, err = run("--model", folder, "--pp", "2", "--svg", file)
    assert (code, out) == (2, "")
    assert err.startswith(
        f"error: weft plan --svg {file}\n  saw: there is no folder {str(tmp_path / 'nowhere')!r}"
    )


def test_a_narrow_terminal_is_no_failure(
    run: Weft, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert run("--model", folder, "--pp", "2")[0] == 0


def test_the_context_is_half_of_few_positions(run: Weft) -> None:
    assert predicted(run, str(DEMO), "--pp", "2")["wanted"]["context"] == 256


def test_gpus_are_split_in_each_way(run: Weft, folder: str) -> None:
    code, out, _ = run("--model", folder, "--gpus", "4", "--latency", "2", "--json")
    assert code == 0
    report = json.loads(out)
    tried = report["gpus"]
    assert [(one["shards"], one["stages"]) for one in tried] == [(1, 4), (2, 2), (4, 1)]
    best = max(tried, key=lambda one: one["tokens_per_second"])
    assert report["predicted"]["tokens_per_second"] == best["tokens_per_second"]
    for one in tried:
        code, alone, _ = run(
            "--model",
            folder,
            "--pp",
            str(one["stages"]),
            "--tp",
            str(one["shards"]),
            "--latency",
            "2",
            "--json",
        )
        assert code == 0
        assert json.loads(alone)["predicted"] == {
            name: one[name] for name in json.loads(alone)["predicted"]
        }
    code, out, _ = run("--model", folder, "--gpus", "4", "--latency", "2")
    assert code == 0
    assert "splits over 4 GPUs (simulated)" in out


def test_a_split_that_does_not_fit_is_marked_and_not_the_best(run: Weft, folder: str) -> None:
    """A stage holds its weights, and the keys and values of every request; of the rest 15% stay
    free."""
    options = ("--gpus", "2", "--requests", "4", "--context", "15", "--latency", "1e6")
    graphs = 500_000_000
    kv = 4 * 16 * KV
    memory = predicted(run, folder, *options)["memory"]
    assert [one["weights"] for one in memory] == [7 * LAYER + 2304 * ROW, LAYER + HEAD]
    assert [one["kv"] for one in memory] == [7 * kv, kv]
    assert [one["total"] for one in memory] == pytest.approx(
        [one["weights"] + (one["kv"] + graphs) / 0.85 for one in memory], rel=1e-12
    )
    alone = predicted(run, folder, "--pp", "1", "--requests", "4", "--context", "15")["memory"]
    assert [(one["weights"], one["kv"]) for one in alone] == [
        (8 * LAYER + HEAD + 2304 * ROW, 8 * kv)
    ]
    tight = str(memory[0]["total"] / 1e9 - 1e-5)
    more = (*options, "--memory", tight)
    report = predicted(run, folder, *more)
    assert [(one["shards"], one["fits"]) for one in report["gpus"]] == [(1, False), (2, True)]
    rates = [one["tokens_per_second"] for one in report["gpus"]]
    assert (rates[0] > rates[1], report["predicted"]["tokens_per_second"]) == (True, rates[1])
    code, out, _ = run("--model", folder, *more)
    rows = out.splitlines()[2:4]
    assert (
        code,
        "589 MB" in rows[0] and rows[0].rstrip().endswith("too large"),
        "best" in rows[1],
    ) == (0, True, True)
    code, out, _ = run("--model", folder, "--pp", "2", *options[2:], "--memory", "0.5")
    assert (code, "does not fit: stage 0 needs 589 MB of 500 MB a GPU" in out) == (1, True)
    assert "Exit with 1 if the model does not fit into memory." in " ".join(
        run("--help")[1].split()
    )
    none = run("--model", folder, *options, "--memory", "0.5")
    assert_refused(
        none,
        "no split fits",
        "--tp 2 --pp 1, does not fit",
        "instead: more GPUs, fewer requests, less",
    )


def test_a_split_that_the_model_does_not_allow_is_named(run: Weft, folder: str) -> None:
    code, out, _ = run("--model", folder, "--gpus", "16", "--requests", "8")
    assert code == 0
    assert "--tp 1 --pp 16 is not possible: 8 layers for 16 stages" in out
    assert "--tp 8 --pp 2 is not possible: 4 heads, and 2 of keys and values" in out


def test_ranks_of_a_stage_stay_in_a_node_where_the_network_is_slow(run: Weft, folder: str) -> None:
    options = (
        "--gpus",
        "4",
        "--requests",
        "8",
        "--cohorts",
        "2",
        "--latency",
        "2",
        "--gpus-per-node",
        "2",
    )
    near, far = (
        predicted(run, folder, *options, *more) for more in ((), ("--node-latency", "500"))
    )
    assert [one["shards"] for one in near["gpus"]] == [1, 2, 4]
    took = [[one["step_time"] for one in report["gpus"]] for report in (near, far)]
    assert took[1][2] > 4 * took[0][2]  # four ranks are in two nodes
    assert far["predicted"]["step_time"] == took[1][1]
    code, out, _ = run(
        "--model", folder, *options, "--node-latency", "500", "--node-link", "50", "--kernel", "2"
    )
    assert code == 0
    assert (
        "nodes of 2 GPUs; between two of them a transfer takes 500 us, and its bytes at 50 GB/s"
        in out
    )
    assert "each of 11 kernels of a layer takes 2 us besides" in out


def test_ranks_that_share_experts_read_as_much_either_way(run: Weft) -> None:
    """In FP8 2 ranks can cut the 6 blocks of an expert's columns, and 4 have whole experts unasked."""
    flags = "--preset", "qwen3-30b-a3b-fp8", "--pp", "1", "--json"
    sizes = {}
    for more in ("2", "2 --experts columns", "2 --experts whole", "4", "4 --experts whole"):
        code, out, err = run(*flags, "--tp", *more.split())
        assert code == 0, err
        sizes[more] = json.loads(out)["model"]["bytes"]["layer"]
    assert sizes["2"] == sizes["2 --experts columns"] == sizes["2 --experts whole"]
    assert sizes["4"] == sizes["4 --experts whole"]
    experts = 128 * (3 * 2048 * 768 + 4 * 3 * 16 * 6)
    assert sizes["2"] - sizes["4"] > experts / 4
    other = "or --experts whole"
    blocks = "a number of ranks n for which moe_intermediate_size / n is a multiple of 128"
    assert_refused(
        run(*flags, "--tp", "4", "--experts", "columns"), "--tp 4 --experts columns", blocks, other
    )
    assert_refused(
        run(*flags, "--experts", "whole"),
        "no --tp and no --gpus",
        "instead: --experts columns|whole --tp N, or --gpus N",
    )


def test_every_split_shares_experts_as_asked(run: Weft) -> None:
    """In FP8 4 ranks cannot cut the 6 blocks of an expert's columns."""
    flags = "--preset", "qwen3-30b-a3b-fp8", "--json", "--requests", "8", "--gpus"
    tried = {}
    for how in ("columns", "whole"):
        code, out, err = run(*flags, "4", "--experts", how)
        assert code == 0, err
        tried[how] = [one["shards"] for one in json.loads(out)["gpus"]]
    assert tried == {"columns": [1, 2], "whole": [1, 2, 4]}
    assert_refused(
        run(*flags, "1", "--experts", "whole"), "weft plan --gpus 1 --experts whole", "one rank"
    )
    assert_refused(run(*flags, "4", "--tp", "2", "--experts", "whole"), "leave out one of the two")


def test_it_needs_no_weights(run: Weft, tmp_path: Path) -> None:
    shutil.copy(Path(DEMO) / "config.json", tmp_path)
    assert run("--model", str(tmp_path), "--pp", "2")[0] == 0
