"""Routing traces for policy_replay.py: recorded ones out of CSV files, and random ones."""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Token = list[list[int]]
"""One token: for each layer its experts, ascending."""


@dataclass(frozen=True)
class Turn:
    """One call of generate."""

    prompt: list[Token]
    decode: list[Token]


@dataclass(frozen=True)
class Trace:
    name: str
    layers: int
    experts: int
    top_k: int
    turns: list[Turn]

    @property
    def experts_per_token(self) -> int:
        """T."""
        return self.layers * self.top_k

    def tokens(self) -> Iterator[tuple[bool, Token]]:
        """What a cache sees: of each turn the last token of the prompt, not counted, and the decoded ones, counted."""
        for turn in self.turns:
            yield from ((False, token) for token in turn.prompt[-1:])
            yield from ((True, token) for token in turn.decode)

    def accesses(self) -> Iterator[tuple[bool, int]]:
        """Keys (layer * E + expert) in order, and whether they are counted."""
        for counted, token in self.tokens():
            for layer, chosen in enumerate(token):
                yield from ((counted, layer * self.experts + expert) for expert in chosen)


def read_trace(path: Path) -> Trace:
    """A file in the format of :mod:`airllm.experts.trace`; columns are found by name, more of them are ignored."""
    head: dict[str, str] = {}
    with open(path, encoding="utf-8") as file:
        lines = []
        for line in file:
            if line.startswith("#"):
                head |= dict(word.split("=", 1) for word in line[1:].split() if "=" in word)
            else:
                lines.append(line)
    layers, experts = int(head["n_layer"]), int(head["n_expert"])
    turns: dict[int, dict[tuple[int, int], Token]] = defaultdict(dict)
    for row in csv.DictReader(lines):
        at = (int(row["phase"]), int(row["step"]))
        token = turns[int(row["turn"])].setdefault(at, [[] for _ in range(layers)])
        token[int(row["layer"])].append(int(row["expert"]))
    made = [Turn(_phase(turn, 0), _phase(turn, 1)) for _, turn in sorted(turns.items())]
    return Trace(head.get("arch", path.stem), layers, experts, int(head["n_expert_used"]), made)


def _phase(turn: dict[tuple[int, int], Token], phase: int) -> list[Token]:
    return [[sorted(chosen) for chosen in token] for (p, _), token in sorted(turn.items()) if p == phase]


def random_trace(name: str, offsets: list[list[float]], noise: Iterable[float], top_k: int, tokens: int) -> Trace:
    """Tokens of their own, each expert's logit being its layer's offset plus noise; the `top_k` largest are chosen."""
    drawn = iter(noise)

    def token() -> Token:
        return [sorted(sorted(range(len(row)), key=lambda e: -(row[e] + next(drawn)))[:top_k]) for row in offsets]

    return Trace(name, len(offsets), len(offsets[0]), top_k, [Turn([token()], [token() for _ in range(tokens)])])


def zipf_trace(layers: int = 32, experts: int = 16, top_k: int = 2, tokens: int = 512, seed: int = 0) -> Trace:
    """In each layer the n-th most popular expert is drawn in proportion to 1/n, without replacement (Gumbel noise)."""
    rng = random.Random(seed)
    offsets = [[-math.log(1 + rank) for rank in rng.sample(range(experts), experts)] for _ in range(layers)]
    noise = iter(lambda: -math.log(-math.log(rng.random())), None)
    return random_trace("random, zipf", offsets, noise, top_k, tokens)


def built_trace(layers: int = 32, experts: int = 16, top_k: int = 2, tokens: int = 512, seed: int = 0) -> Trace:
    """The routing of the checkpoints of build_checkpoint.py: logits N(0, 1.28^2) and a fixed offset N(0, 0.64^2) an expert."""
    rng = random.Random(seed)
    offsets = [[rng.gauss(0, 0.64) for _ in range(experts)] for _ in range(layers)]
    return random_trace("random, as built", offsets, iter(lambda: rng.gauss(0, 1.28), None), top_k, tokens)
