"""`python -m airllm …` is the command `airllm …`."""

from __future__ import annotations

from airllm.cli import main

if __name__ == "__main__":
    main()
