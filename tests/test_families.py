"""Families on slots: transformers' own logits and tokens at three budgets, by the script that tries all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import family_models  # noqa: E402
import family_table  # noqa: E402

FOLDERS = {family.folder: family for family in family_models.families()}
EXACT = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",  # linear attention beside full attention
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",  # a dense first layer, shared experts, groups
    "deepseek_v4",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",  # experts of two sizes
    "gemma4",
    "glm4_moe",
    "gpt_oss",  # transposed, interleaved, biases
    "jamba",  # state-space layers
    "lfm2_moe",
    "minimax",
    "nemotron_h",  # no gate
    "qwen3_vl_moe",  # the language model below a prefix
]


@pytest.mark.parametrize("folder", EXACT)
def test_a_family_gives_transformers_logits_and_tokens_at_every_budget(folder: str) -> None:
    row = family_table.run_family(FOLDERS[folder])
    assert (row.outcome, row.reason) == ("exact", "")


@pytest.mark.parametrize("folder", ["jetmoe"])
def test_a_family_outside_the_contract_is_refused_and_says_what_is_missing(folder: str) -> None:
    row = family_table.run_family(FOLDERS[folder])
    assert row.outcome == "refused" and "experts contract" in row.reason


def test_a_difference_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    from airllm.experts.runtime import SlotExpertRuntime

    run = SlotExpertRuntime.run
    monkeypatch.setattr(SlotExpertRuntime, "run", lambda self, *call: run(self, *call) * (1 + 2**-20))
    row = family_table.run_family(FOLDERS["mixtral"])
    assert row.outcome == "differs" and "logits differ" in row.reason


def test_the_documents_say_what_the_committed_results_say() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "family_docs.py"), "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0, "run benchmarks/family_docs.py"
