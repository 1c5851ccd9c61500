"""The slots: the only device memory that holds experts, allocated once; addresses never change."""

from __future__ import annotations

import torch

from airllm.errors import BudgetError
from airllm.experts.budget import SlotPlan
from airllm.experts.layout import ExpertLayout, ModelLayout


class SlotPool:
    """``plan.slots`` slots with ``plan.scratch`` scratch slots behind them, in one allocation.

    ``blocks[place]``: uint8 [expert_bytes]; ``views_as(layout)[place]``: the projections in layout order ([2I, H], [H, I]).
    """

    def __init__(self, layout: ModelLayout, plan: SlotPlan, device: torch.device) -> None:
        self.plan = plan
        places = plan.slots + plan.scratch
        try:
            self._memory = torch.empty(places, layout.expert_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{places} slots of {layout.expert_bytes} B ({places * layout.expert_bytes} B) do not fit on {device}: "
                f'lower expert_cache_gb or resident_gb, or use expert_cache_gb="auto" ({error})'
            ) from error
        self.blocks: tuple[torch.Tensor, ...] = tuple(self._memory.unbind(0))
        self._views = {each: tuple(each.views(block) for block in self.blocks) for each in set(layout.layers)}
        self._layout = layout

    @property
    def memory(self) -> torch.Tensor:
        """All places: uint8 [slots + scratch, expert_bytes]."""
        return self._memory

    @property
    def views(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """`views_as` of the first layer's layout: of every layer's, where all have one."""
        return self._views[self._layout.layers[0]] if self._views else ()

    def views_as(self, layout: ExpertLayout) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Every place as an expert of ``layout``."""
        return self._views[layout]

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def poison(self, place: int | None = None) -> None:
        """Fill with 0xFF bytes, which are NaN in every floating type: what is read before it is copied shows. For tests."""
        (self._memory if place is None else self.blocks[place]).fill_(255)

    def close(self) -> None:
        """Give the device memory back. Idempotent."""
        self.blocks, self._views = (), {}
        self._memory = torch.empty(0, dtype=torch.uint8)
