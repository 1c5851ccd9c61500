"""AirLLM's class names by model family. transformers knows the families apart, so there is nothing left to add."""

from __future__ import annotations

from airllm.airllm_base import AirLLMBaseModel


class AirLLMLlama2(AirLLMBaseModel):
    """Llama of any generation."""


class AirLLMMistral(AirLLMBaseModel):
    """Mistral."""


class AirLLMMixtral(AirLLMBaseModel):
    """Mixtral: its experts are streamed with their layer."""


class AirLLMQWen(AirLLMBaseModel):
    """The first Qwen, which runs code of its own checkpoint (trust_remote_code=True)."""


class AirLLMQWen2(AirLLMBaseModel):
    """Qwen 2 and later."""


class AirLLMChatGLM(AirLLMBaseModel):
    """ChatGLM."""


class AirLLMBaichuan(AirLLMBaseModel):
    """Baichuan, which runs code of its own checkpoint (trust_remote_code=True)."""


class AirLLMInternLM(AirLLMBaseModel):
    """InternLM."""
