"""The README's examples, run as they are written, and the commands that CI takes out of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", README, re.DOTALL))
COMMANDS = dict(re.findall(r"<!-- command: (\w+) -->\n```bash\n(.*?)```", README, re.DOTALL))
PRINTS = {"stream": "And it came to pass", "slots": "generation_disk_expert_reads 0"}


def test_the_readme_has_the_examples_and_commands_that_are_run():
    assert set(EXAMPLES) == set(PRINTS)
    assert set(COMMANDS) == {"demo", "tests"}


@pytest.mark.parametrize("name", sorted(PRINTS))
def test_each_example_runs_as_written_and_prints_what_it_shows(name, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[name]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout


def test_every_keyword_in_the_readmes_table_is_one_that_is_taken():
    from airllm.options import KEYWORDS

    table = README.partition("### Keywords")[2].partition("A misspelt")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert len(named) > 15 and named <= set(KEYWORDS)
