"""The import-order tool: clean on this package, and loud about planted faults."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("check_imports", ROOT / "tools" / "check_imports.py")
assert spec is not None and spec.loader is not None
check_imports = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_imports)


@pytest.fixture
def package(tmp_path):
    """A package of two rooms, `errors` before `options`, and a sub-package."""
    root = tmp_path / "airllm"
    (root / "experts").mkdir(parents=True)
    for name in ("__init__", "errors", "options", "experts/__init__", "experts/budget"):
        (root / f"{name}.py").write_text("")
    return root


ORDER = ("errors", "experts.budget", "options")


def test_this_package_flows_one_way():
    assert check_imports.check_order(ROOT / "airllm") == []


def test_pure_rooms_import_no_torch_and_dependencies_have_one_owner():
    assert check_imports.check_ownership(ROOT / "airllm") == []


def test_importing_the_package_is_silent_and_light():
    assert check_imports.check_silent_import() == []


@pytest.mark.parametrize(
    "line",
    [
        "from airllm.options import x",
        "from airllm import options",
        "import airllm.options",
        "from . import options",
        "def f():\n    from .options import x",
        "if TYPE_CHECKING:\n    from airllm.options import x",
    ],
)
def test_an_import_against_the_flow_is_found_however_it_is_written(package, line):
    (package / "errors.py").write_text(line)
    faults = check_imports.check_order(package, ORDER)
    assert len(faults) == 1 and "errors must not import options" in faults[0]


@pytest.mark.parametrize("line", ["from ..options import x", "from airllm.options import x", "from .. import options"])
def test_relative_imports_from_a_sub_package_are_resolved(package, line):
    (package / "experts" / "budget.py").write_text(line)
    faults = check_imports.check_order(package, ORDER)
    assert len(faults) == 1 and "experts.budget must not import options" in faults[0]


def test_imports_with_the_flow_are_fine(package):
    (package / "options.py").write_text("from airllm.errors import X\nfrom airllm.experts import budget\nimport airllm\n")
    assert check_imports.check_order(package, ORDER) == []


def test_a_module_without_a_place_is_named(package):
    (package / "helper.py").write_text("")
    assert "helper has no place" in check_imports.check_order(package, ORDER)[0]


def test_torch_in_a_pure_room_is_found(package):
    (package / "experts" / "budget.py").write_text("import torch.nn")
    assert "must work without torch" in check_imports.check_ownership(package)[0]


def test_a_second_user_of_the_hub_client_is_found(package):
    (package / "options.py").write_text("def f():\n    import huggingface_hub")
    assert "only locate may import huggingface_hub" in check_imports.check_ownership(package)[0]


@pytest.mark.parametrize("line", ["print('hello')", "import tqdm"])
def test_an_import_that_does_something_is_found(package, line):
    (package / "__init__.py").write_text(line)
    assert check_imports.check_silent_import(package.parent)
