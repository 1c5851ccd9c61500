#!/usr/bin/env python
"""Record the routing of a model while it writes: by default the shipped tiny model, greedily, after its own prompts.

    python benchmarks/record_routing.py OUT.csv [--model FOLDER] [--tokens 64] [--device cpu]

The file is what policy_replay.py reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def record(folder: Path, prompts: list[str], tokens: int, out: Path, device: str) -> None:
    """One turn a prompt, `tokens` decoded tokens each, in float32 on the CPU."""
    from airllm import AutoModel

    options = {"dtype": torch.float32} if device == "cpu" else {}
    options |= {"expert_cache_backend": "slot", "expert_cache_engine": "plain", "expert_cache_gb": 1.0}
    with AutoModel.from_pretrained(str(folder), device=device, **options) as model, model.record_routing(out):
        for prompt in prompts:
            inputs = model.tokenizer(prompt, return_tensors="pt").to(device)
            model.generate(**inputs, max_new_tokens=tokens + 1, min_new_tokens=tokens + 1, do_sample=False)


def main(arguments: list[str] | None = None) -> int:
    from airllm import tiny_model_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=tiny_model_path())
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", action="append", help="again for another turn; default: prompts.json of the model")
    given = parser.parse_args(arguments)
    prompts = given.prompt or [each["prompt"] for each in json.loads((given.model / "prompts.json").read_text())["prompts"]]
    record(given.model, prompts, given.tokens, given.out, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
