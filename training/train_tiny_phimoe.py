r"""Train the tiny PhiMoE that the package ships, from scratch, on the King James Bible.

    python training/train_tiny_phimoe.py --prepare --corpus .corpus/kjv.txt.xz          (once, on Debian)
    python training/train_tiny_phimoe.py --corpus .corpus/kjv.txt.xz --out FIRST --minutes 4.5 --seed 1 \
        --lr 2e-3 --locality 0.05

The learning rate follows the wall clock, so that a run ends when its minutes do, whatever the machine.

    python training/train_tiny_phimoe.py --corpus .corpus/kjv.txt.xz --start FIRST --by-heart 48 --length 160 \
        --steps 400 --batch 16 --lr 1e-3 --out airllm/tiny_phimoe

goes on from a model of the first kind until it knows the beginnings of some chapters by heart. After those its tokens no longer
hang on half-precision rounding: the two best logits lie far apart.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import kjv_corpus
import model as tiny
import report
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import PhimoeForCausalLM

log = logging.getLogger("train_tiny_phimoe")
PEAK_NOISE = 0.15


@dataclass
class Data:
    """One stream of token ids for training (on the device), where its verses start, and the held-out stream."""

    train: Tensor
    verse_starts: Tensor
    held_out: Tensor
    held_out_bytes: int
    generator: torch.Generator = field(repr=False)
    by_heart: Tensor | None = None

    def windows(self, batch: int, length: int) -> Tensor:
        """[batch, length + 1] ids; half of the windows begin where a verse does, as prompts do.

        With passages to learn by heart (``by_heart`` [passages, length + 1]) half of the batch are such.
        """
        if self.by_heart is not None:
            pick = torch.randint(self.by_heart.shape[0], (batch // 2,), generator=self.generator)
            return torch.cat([self.by_heart[pick.to(self.by_heart.device)], self._anywhere(batch - batch // 2, length)])
        return self._anywhere(batch, length)

    def _anywhere(self, batch: int, length: int) -> Tensor:
        last = self.train.numel() - length - 1
        anywhere = torch.randint(last, (batch,), generator=self.generator)
        pick = torch.randint(self.verse_starts.numel(), (batch,), generator=self.generator)
        starts = torch.where(torch.arange(batch) % 2 == 0, anywhere, self.verse_starts[pick].clamp(max=last))
        return self.train[(starts[:, None] + torch.arange(length + 1)).to(self.train.device)]


def load_data(
    books: dict[str, str], passages: list[str], tokenizer: Tokenizer, length: int, seed: int, device: torch.device
) -> Data:
    """Tokenize the books: each begins with the end-of-text token, as it follows the one before."""
    end = tokenizer.token_to_id(kjv_corpus.END_OF_TEXT)
    streams: dict[bool, list[int]] = {True: [], False: []}
    for name, text in books.items():
        streams[name in kjv_corpus.HELD_OUT_BOOKS] += [end, *tokenizer.encode(text).ids]
    train = torch.tensor(streams[False])
    breaks = [i for piece, i in tokenizer.get_vocab().items() if piece.strip("Ċ") == ""]
    starts = torch.isin(train, torch.tensor([end, *breaks])).nonzero().flatten() + 1
    held_out_bytes = sum(len(books[name].encode()) for name in kjv_corpus.HELD_OUT_BOOKS)
    generator = torch.Generator().manual_seed(seed)
    by_heart = torch.tensor([tokenizer.encode(text).ids[: length + 1] for text in passages]).to(device) if passages else None
    return Data(train.to(device), starts, torch.tensor(streams[True]).to(device), held_out_bytes, generator, by_heart)


@torch.no_grad()
def held_out_bits_per_byte(model: PhimoeForCausalLM, data: Data, length: int) -> float:
    """Mean code length of the held-out books, in windows that do not see each other."""
    model.eval()
    bits = 0.0
    for piece in data.held_out.split(length + 1):
        if piece.numel() < 2:
            continue
        logits = model(input_ids=piece[None, :-1], use_cache=False).logits[0].float()
        bits += F.cross_entropy(logits, piece[1:], reduction="sum").item() / math.log(2)
    model.train()
    return bits / data.held_out_bytes


def new_optimizer(model: PhimoeForCausalLM, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only (neither biases, norms nor embeddings)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim >= 2 and "embed" not in name]
    plain = [p for name, p in named if p.ndim < 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=fused)


def schedule(done: float, peak_noise: float) -> tuple[float, float]:
    """Share of the peak learning rate, and the router's noise, once the share `done` of the run is over.

    The wide noise at first lets the router's gradient reach experts that are not near ties: at PhiMoE's own 0.01
    sparsemixer hardly gives one. The last third runs at 0.01, which is what the saved model uses. A run that goes on from
    another needs no wide noise.
    """
    warm = min(1.0, done / 0.03)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    noise = max(0.01, peak_noise * (1 - done / 0.65))
    return warm * (0.01 + 0.99 * cosine), noise


def train(model: PhimoeForCausalLM, data: Data, args: argparse.Namespace) -> dict[str, object]:
    """Run until the minutes (or the steps) are over; returns what provenance needs to know about the run."""
    optimizer = new_optimizer(model, args.lr)
    history: list[dict[str, float]] = []
    start = now = time.monotonic()
    next_log = 0.0
    step = 0
    while (done := step / args.steps if args.steps else (now - start) / (60 * args.minutes)) < 1:
        rate, noise = schedule(done, 0.01 if args.start else PEAK_NOISE)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        tiny.set_router_noise(model, noise)
        loss, parts = tiny.training_loss(model, data.windows(args.batch, args.length), args.balance, args.locality)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if done >= next_log:
            history.append(_log_line(model, data, args, step, done, parts))
            next_log = done + 0.05
        elif step % 8 == 0 and model.device.type == "cuda":
            torch.cuda.synchronize()  # the clock below must not run ahead of the device
        now = time.monotonic()
    history.append(_log_line(model, data, args, step, 1.0, parts))
    return {
        "steps": step,
        "minutes": round((now - start) / 60, 2),
        "tokens_seen": step * args.batch * args.length,
        "windows_a_step": args.batch,
        "tokens_a_window": args.length,
        "peak_learning_rate": args.lr,
        "balance_weight": args.balance,
        "locality_weight": args.locality,
        "history": history,
    }


def _log_line(
    model: PhimoeForCausalLM, data: Data, args: argparse.Namespace, step: int, done: float, parts: dict[str, Tensor]
) -> dict[str, float]:
    line = {"step": step, "done": done, **{name: value.item() for name, value in parts.items()}}
    if done == 1 or int(done * 20) % 5 == 4:  # it costs as much as a few dozen steps
        line["held_out_bits_per_byte"] = held_out_bits_per_byte(model, data, args.length)
    log.info("  ".join(f"{name} {value:.4g}" for name, value in line.items()))
    return {name: round(value, 4) for name, value in line.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="the prepared text, *.txt.xz")
    parser.add_argument("--prepare", action="store_true", help="write the corpus and its tokenizer, then stop")
    parser.add_argument("--out", type=Path, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=4.0, help="wall-clock length of the training itself")
    parser.add_argument("--steps", type=int, default=0, help="train this many steps instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--length", type=int, default=512, help="tokens a window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the load imbalance")
    parser.add_argument("--locality", type=float, default=0.02, help="weight of neighbouring tokens' agreement")
    parser.add_argument("--start", type=Path, help="go on from the model in this folder")
    parser.add_argument("--by-heart", type=int, default=0, metavar="N", help="learn the beginnings of N chapters by heart")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if not args.prepare and args.out is None:
        parser.error("--out is needed to train")
    return args


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse_arguments()
    if args.prepare:
        kjv_corpus.prepare(args.corpus, tiny.VOCAB_SIZE)
        return
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")  # TF32: the routing needs more than bfloat16's eight bits
    tokenizer = Tokenizer.from_file(str(args.corpus.parent / "tokenizer.json"))
    books, _ = kjv_corpus.load(args.corpus)
    passages = kjv_corpus.passages(books, args.by_heart)
    data = load_data(books, list(passages.values()), tokenizer, args.length, args.seed, device)
    model = tiny.new_model(args.seed, device, args.start)
    count = sum(p.numel() for p in model.parameters())
    log.info("%d parameters, %d training tokens, on %s", count, data.train.numel(), device)
    before = json.loads((args.start / "training.json").read_text()) if args.start else None
    run = train(model, data, args)
    if passages:
        run["by_heart"] = {"passages": len(passages), "tokens_each": args.length + 1}
    if before:
        run["before"] = before
    report.save(model, tiny.wrap_tokenizer(tokenizer), args, run, data)


if __name__ == "__main__":
    main()
