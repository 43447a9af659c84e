"""Trains the checkpoint behind `weft demo`: a byte-level Qwen3 decoder of about a million
parameters.

The text is English prose that Python itself ships (`tests/training/demo_text.py`). The result is a
folder that `transformers` reads. Nothing of weft has a part in it.

    python tests/training/train_demo.py --out stages/demo --minutes 4 --device cuda
"""

import argparse
import hashlib
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from demo_text import (
    END,
    END_TEXT,
    byte_tokenizer,
    documents,
    shipped_texts,
    split_held_out,
    token_ids,
)
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LENGTH = 512  # tokens in a training crop, and the model's longest sequence
LIMIT = 2_000_000  # bytes that the shipped folder may weigh
PROMPTS = ("The function returns", "A list is", "In Python, ")


# --------------------------------------------------------------------------------------------------------- the training


def demo_config() -> Qwen3Config:
    """Six layers, four query heads to two key-value heads: 974,976 parameters, as many as `LIMIT`
    allows."""
    return Qwen3Config(
        vocab_size=END + 1,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=280,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.04,
        eos_token_id=END,
        dtype="bfloat16",
    )


def with_dropout(model: nn.Module, rate: float) -> list[Any]:
    """Drops `rate` of what each block adds to the residual stream, while the model trains; handles
    that undo it."""

    def drop(module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        return F.dropout(out, rate, module.training)

    ends = [m for name, m in model.named_modules() if name.endswith(("o_proj", "down_proj"))]
    return [end.register_forward_hook(drop) for end in ends] if rate else []


def mean_loss(model: nn.Module, crops: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token, of each next id in `crops`, int64 of shape (batch,
    length + 1)."""
    logits = model(input_ids=crops[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), crops[:, 1:].flatten())


def bits_per_byte(model: nn.Module, ids: Tensor) -> float:
    """Mean bits for each next id of the stream `ids`, shape (n,), in windows of `LENGTH` that do
    not overlap."""
    was_training = model.training
    model.eval()
    windows = ids[: (len(ids) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    with torch.no_grad():
        nats = [mean_loss(model, some).item() * len(some) for some in torch.split(windows, 32)]
    model.train(was_training)
    return sum(nats) / len(windows) / math.log(2)


def learning_rate(done: float, peak: float, warm_up: float = 0.02) -> float:
    """The rate once the part `done`, 0 to 1, of the training is past: a linear warm-up, then a
    cosine to zero."""
    if done < warm_up:
        return peak * (done + 1e-3) / warm_up
    return peak * (1 + math.cos(math.pi * min(1.0, (done - warm_up) / (1 - warm_up)))) / 2


def optimizer_for(model: nn.Module, decay: float) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the gains of the norms alone; fused on a GPU."""
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=params[0].is_cuda)


def compiled_or_not(
    loss: Callable[[Tensor], Tensor], crops: Tensor
) -> tuple[Callable[[Tensor], Tensor], bool]:
    """`loss` compiled, where that works on such crops on a GPU, and whether it did; else `loss`
    itself."""
    if not crops.is_cuda:
        return loss, False
    try:
        fast: Callable[[Tensor], Tensor] = torch.compile(loss)
        for _ in range(3):
            fast(crops).backward()
        torch.cuda.synchronize()
        return fast, True
    except Exception as error:  # whatever went wrong, the plain function will do
        print(f"not compiled: {type(error).__name__}: {str(error)[:300]}")
        return loss, False


def progress(steps: int | None, minutes: float) -> Iterator[tuple[int, float]]:
    """(step, part done): for `steps` steps, or where that is None for as many as fit in `minutes`."""
    start = time.monotonic()
    for step in itertools.count():
        done = step / steps if steps is not None else (time.monotonic() - start) / (60 * minutes)
        if done >= 1:
            return
        yield step, done


def train(
    model: nn.Module, ids: Tensor, eval_ids: Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains `model` in place on random crops of `ids`, both on one device, and says how that went."""
    generator = torch.Generator(ids.device).manual_seed(options.seed)
    offsets = torch.arange(LENGTH + 1, device=ids.device)

    def crops() -> Tensor:
        at = torch.randint(
            len(ids) - LENGTH, (options.batch, 1), generator=generator, device=ids.device
        )
        return ids[at + offsets]

    def autocast_loss(some: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            return mean_loss(model, some)

    model.train()
    handles = with_dropout(model, options.dropout)
    optimizer = optimizer_for(model, options.decay)
    loss_of, compiled = compiled_or_not(autocast_loss, crops())
    optimizer.zero_grad()
    step = 0
    history = list[float]()
    bar = tqdm(total=100.0, mininterval=1.0, bar_format="{l_bar}{bar}|{postfix}")
    for step, done in progress(options.steps, options.minutes):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, options.rate)
        loss = loss_of(crops())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:  # reading the loss also keeps the host from running ahead of the clock
            bar.update(100 * done - bar.n)
            bar.set_postfix_str(f"step {step}, {loss.item() / math.log(2):.3f} bits")
        if 10 * done >= len(history) + 1:
            history.append(round(bits_per_byte(model, eval_ids), 4))
            tqdm.write(
                f"{100 * done:3.0f} %: step {step}, held out {history[-1]:.4f} bits per byte"
            )
    bar.close()
    for handle in handles:
        handle.remove()
    return {"steps": step + 1, "compiled": compiled, "held_out_by_tenths": history}


# ------------------------------------------------------------------------------------------------------- the checkpoint


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Writes the model, in bfloat16, and the tokenizer into the folder `out`, as `transformers`
    reads them."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=END)
    nn.Module.to(model, torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    byte_tokenizer().save(str(out / "tokenizer.json"))
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TEXT,
        "pad_token": END_TEXT,
        "model_max_length": LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(words, indent=2) + "\n")


def samples(out: Path, seed: int) -> Iterator[str]:
    """The saved model's continuations of `PROMPTS`, greedy and at temperature 0.7, read back by
    `transformers`."""
    # It comes in eval mode
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    torch.manual_seed(seed)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        if ids[0].tolist() != list(prompt.encode()) or tokenizer.decode(ids[0]) != prompt:
            raise ValueError(
                f"the saved tokenizer should give the bytes of {prompt!r}, but gives"
                f" {ids[0].tolist()}"
            )
        for how in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 0}):
            text = tokenizer.decode(
                model.generate(ids, max_new_tokens=160, **how)[0], skip_special_tokens=True
            )
            yield f"[{how.get('temperature', 0)}] {text}"


def checked_size(out: Path) -> int:
    """The bytes of the files that ship, or an error where they are over `LIMIT`."""
    total = sum(
        path.stat().st_size for path in out.iterdir() if path.suffix in (".json", ".safetensors")
    )
    if total > LIMIT:
        raise ValueError(f"{out} holds {total:,} bytes, over {LIMIT:,}: make demo_config() smaller")
    return total


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The options of one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="how long to train, compiling not counted"
    )
    parser.add_argument(
        "--steps", type=int, help="train for so many steps instead, which a run can repeat"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch", type=int, help=f"crops of {LENGTH} tokens a step (128 on a GPU, 8 on a CPU)"
    )
    parser.add_argument("--rate", type=float, default=4e-3, help="the highest learning rate")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument(
        "--dropout", type=float, default=0.05, help="dropout of what each block adds"
    )
    options = parser.parse_args(argv)
    options.batch = options.batch or (128 if options.device == "cuda" else 8)
    return options


def main(argv: list[str] | None = None) -> None:
    """Gathers the text, trains, saves, and prints samples of what came out."""
    options = parsed(argv)
    texts = documents(shipped_texts())
    size = sum(len(text) for text in texts)
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    print(f"{size:,} bytes of text in {len(texts):,} documents, sha256 {digest[:16]}")
    ids, eval_ids = (token_ids(part).to(options.device) for part in split_held_out(texts))
    torch.manual_seed(options.seed)
    model = nn.Module.to(Qwen3ForCausalLM(demo_config()), options.device, torch.float32)
    told = train(model, ids, eval_ids, options)
    nn.Module.to(nn.Module.to(model, torch.bfloat16), torch.float32)  # measured as it is shipped
    told["bits_per_byte"] = {
        "held_out": bits_per_byte(model, eval_ids),
        "trained_on": bits_per_byte(model, ids[:400_000]),
    }
    told["tokens"] = told["steps"] * options.batch * LENGTH
    told["parameters"] = sum(p.numel() for p in model.parameters())
    told["corpus"] = {"bytes": size, "documents": len(texts), "sha256": digest}
    told["options"] = {key: value for key, value in vars(options).items() if key != "out"}
    told["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    told["versions"]["transformers"] = transformers.__version__
    told["device"] = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    save(model, options.out)
    (options.out / "training.json").write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps(told, indent=2), *samples(options.out, options.seed), sep="\n")
    print(f"{checked_size(options.out):,} bytes in {options.out}")


if __name__ == "__main__":
    main()
