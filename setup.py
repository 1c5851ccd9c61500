"""What the package is and needs. Tool settings stand in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Read the version without importing the package: at build time its dependencies may not be there."""
    text = (ROOT / "airllm" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", text, re.MULTILINE)
    if match is None:
        raise RuntimeError("airllm/__init__.py has no line __version__ = \"...\"")
    return match.group(1)


def read_readme() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


setup(
    name="airllm",
    version=read_version(),
    description="Run language models larger than your GPU: layer streaming, and mixture-of-experts on fixed GPU slots",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["airllm", "airllm.*"]),
    package_data={"airllm": ["tiny_phimoe/*", "py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        # 5.7 is the first release whose experts registry takes names from outside transformers.
        "transformers>=5.7",
        "safetensors",
        "huggingface_hub",
        "accelerate",
        "tqdm",
        # Already a dependency of transformers; named because airllm.cli imports it itself.
        "typer",
    ],
    extras_require={
        "bitsandbytes": ["bitsandbytes"],
        "bench": ["matplotlib"],
        "test": ["pytest", "pytest-xdist", "ruff", "mypy"],
    },
    entry_points={"console_scripts": ["airllm = airllm.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
