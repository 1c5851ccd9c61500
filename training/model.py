"""What is trained: PhiMoE's geometry at 1/1900 of Phi-tiny's size, its tokenizer, and the loss around transformers' model.

Shapes: B windows, S tokens a window, T = B*S tokens, K experts a token, E experts a layer, H hidden, I expert width, L layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from kjv_corpus import END_OF_TEXT
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PhimoeConfig, PhimoeForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

VOCAB_SIZE = 768
ALL_EXPERTS_AT_ONCE = "all_experts_at_once"


def tiny_config() -> PhimoeConfig:
    """Phi-tiny's oddities in small: 4 heads of 24 on a hidden size of 128 (Phi-tiny: 16 of 128 on 4096), a window,
    biases everywhere, untied head, sparsemixer over 8 experts a layer."""
    return PhimoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=80,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        sliding_window=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=True,
        lm_head_bias=True,
        tie_word_embeddings=False,
        router_jitter_noise=0.01,
        input_jitter_noise=0.01,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The saved form: pad and eos are one token, as in Phi-tiny, and batches are padded on the left."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def all_experts_at_once(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every token in two matrix products: four times the arithmetic, but no wait for the routing.

    At this size a GPU is bound by launches and by the host's waits, which the built-in implementations need.
    """
    count, width = experts.num_experts, experts.intermediate_dim
    combine = hidden.new_zeros(hidden.shape[0], count).scatter(1, index, weights)  # [T, E]
    gate_up = F.linear(hidden, experts.gate_up_proj.flatten(0, 1)).unflatten(1, (count, 2 * width))  # [T, E, 2I]
    gate, up = gate_up.chunk(2, dim=-1)
    inner = experts.act_fn(gate) * up * combine.unsqueeze(-1)  # [T, E, I]; the weight may go before a linear map
    return inner.flatten(1) @ experts.down_proj.transpose(1, 2).flatten(0, 1)  # [T, H]


def new_model(seed: int, device: torch.device, start: Path | None = None) -> PhimoeForCausalLM:
    """transformers' own model in fp32, in training mode, with fresh weights or those in the folder ``start``."""
    type(ALL_EXPERTS_FUNCTIONS).register(ALL_EXPERTS_AT_ONCE, all_experts_at_once)
    torch.manual_seed(seed)
    model = PhimoeForCausalLM.from_pretrained(start, dtype=torch.float32) if start else PhimoeForCausalLM(tiny_config())
    model.set_experts_implementation(ALL_EXPERTS_AT_ONCE if device.type == "cuda" else "grouped_mm")
    return model.to(device).train()


def set_router_noise(model: PhimoeForCausalLM, noise: float) -> None:
    """How far below the best logit (twice this, relative) an expert may be and still be drawn in training."""
    for layer in model.model.layers:
        layer.mlp.router.router_jitter_noise = noise


def router_terms(router_logits: tuple[Tensor, ...], windows: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Two scalars from L tensors [T, E]: load imbalance per layer (1 is even), and agreement of neighbouring tokens.

    Imbalance is the Switch Transformer's term, computed layer by layer: transformers' own sums all layers first,
    so that a collapsed layer can hide behind another. Agreement is the mean dot product of neighbours' router
    distributions: raising it is what gives the routing the locality in time that large models have.
    """
    logits = torch.stack(router_logits).float()  # [L, T, E]
    probs = logits.softmax(dim=-1)
    chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k, dim=-1).indices, 1.0 / top_k)
    imbalance = (chosen.mean(dim=1) * probs.mean(dim=1)).sum(dim=-1).mean() * probs.shape[-1]
    by_window = probs.unflatten(1, (windows, -1))  # [L, B, S, E]
    agreement = (by_window[:, :, 1:] * by_window[:, :, :-1]).sum(dim=-1).mean()
    return imbalance, agreement


def training_loss(
    model: PhimoeForCausalLM, tokens: Tensor, balance: float, locality: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of windows [B, S+1] (next-token cross entropy and the two router terms), and its parts for the log."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    out = model(input_ids=inputs, output_router_logits=True, use_cache=False)
    cross_entropy = F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())
    imbalance, agreement = router_terms(out.router_logits, tokens.shape[0], model.config.num_experts_per_tok)
    loss = cross_entropy + balance * imbalance - locality * agreement
    parts = {"cross_entropy": cross_entropy, "imbalance": imbalance, "agreement": agreement}
    return loss, {name: value.detach() for name, value in parts.items()}
