"""model_type decides the class; everything wrong is refused before the weights are touched."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import airllm
from airllm import AutoModel
from airllm.errors import CheckpointError, OptionError, UnsupportedModelError

CLASSES = {
    "llama": "AirLLMLlama2",
    "mistral": "AirLLMMistral",
    "mixtral": "AirLLMMixtral",
    "qwen2": "AirLLMQWen2",
    "qwen3": "AirLLMQWen2",
    "phimoe": "AirLLMPhiMoE",
    "gpt2": "AirLLMBaseModel",
    "olmoe": "AirLLMBaseModel",
    "deepseek_v3": "AirLLMBaseModel",
}


def test_auto_model_itself_is_not_made() -> None:
    with pytest.raises(EnvironmentError, match="from_pretrained"):
        AutoModel()


@pytest.mark.parametrize("family", sorted(CLASSES))
def test_the_model_type_decides_the_class(family: str, checkpoint: Callable[..., Path]) -> None:
    assert AutoModel.get_module_class(checkpoint(family), device="cpu") == ("airllm", CLASSES[family])


@pytest.mark.parametrize("family", ["llama", "olmoe", "phimoe"])
def test_a_model_of_the_class_is_loaded_and_answers(family: str, checkpoint: Callable[..., Path]) -> None:
    with AutoModel.from_pretrained(checkpoint(family), device="cpu") as model:
        assert type(model).__name__ == CLASSES[family]
        assert type(model) is getattr(airllm, CLASSES[family])
        assert isinstance(model, airllm.AirLLMBaseModel)
        assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, min_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize("name", ["PhiMoEForCausalLM", "PhimoeForCausalLM", "Anything"])
def test_the_spelling_of_the_architecture_does_not_matter_and_remote_code_is_not_taken(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoint("phimoe") / "config.json").read_text())
    config |= {"architectures": [name], "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise AssertionError('remote code was run')")
    for trust in (False, True):
        found = AutoModel.get_module_class(tmp_path, device="cpu", trust_remote_code=trust)
        assert found == ("airllm", "AirLLMPhiMoE")


def test_positional_keywords_are_those_of_the_classes(checkpoint: Callable[..., Path]) -> None:
    model = AutoModel.from_pretrained(checkpoint("llama"), "cpu", "bfloat16", 77)
    assert (model.device.type, model.dtype, model.max_seq_len) == ("cpu", torch.bfloat16, 77)
    with pytest.raises(TypeError, match="multiple values for device"):
        AutoModel.from_pretrained(checkpoint("llama"), "cpu", device="cpu")
    with pytest.raises(TypeError, match="at most 9"):
        AutoModel.from_pretrained(*range(11))


def test_a_wrong_keyword_is_refused_before_the_checkpoint_is_looked_for() -> None:
    for keywords in ({"compresion": "4bit"}, {"expert_cache_gb": 1}, {"dtype": "int8"}):
        with pytest.raises(OptionError):
            AutoModel.from_pretrained("/no/such/folder", device="cpu", **keywords)
        with pytest.raises(OptionError):
            AutoModel.get_module_class("/no/such/folder", device="cpu", **keywords)


def test_a_model_that_is_nowhere_is_an_error_that_says_so() -> None:
    with pytest.raises(CheckpointError, match="/no/such/folder"):
        AutoModel.from_pretrained("/no/such/folder", device="cpu")


@pytest.mark.parametrize(("family", "reason"), [("llama", "dense"), ("gpt2", "dense")])
def test_slots_are_refused_before_any_weight_is_fetched_or_read(
    family: str, reason: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airllm.airllm_base.locate", None)  # it is what downloads weights
    (tmp_path / "config.json").write_text((checkpoint(family) / "config.json").read_text())  # and no weights at all
    with pytest.raises(UnsupportedModelError, match=rf"{family}.*{reason}"):
        AutoModel.from_pretrained(tmp_path, device="cpu", expert_cache_backend="slot", expert_cache_gb=1)


def test_every_exported_name_is_there() -> None:
    for name in airllm.__all__:
        assert getattr(airllm, name) is not None
    assert set(airllm.__all__) <= set(dir(airllm))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = airllm.Nothing
    assert airllm.tiny_model_path().name == "tiny_phimoe"


@pytest.mark.parametrize("name", [n for n in airllm.__all__ if n.startswith("AirLLM") and n != "AirLLMError"])
def test_every_class_of_the_contract_is_a_base_model(name: str) -> None:
    assert issubclass(getattr(airllm, name), airllm.AirLLMBaseModel)


def test_importing_the_package_does_nothing() -> None:
    script = (
        "import sys, logging, threading, airllm\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'imported too early'\n"
        "from airllm import AutoModel, AirLLMBaseModel\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized() and threading.active_count() == 1\n"
        "assert not logging.getLogger('airllm').handlers\n"
        "assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()\n"
    )
    root = str(Path(importlib.import_module("airllm").__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
