"""One decoded token of the whole model as one step: on a GPU recorded once as a graph and then replayed.

generate stays transformers' own, with all it offers. It gets a cache of a fixed size from here, and each of its forwards of
one new token on that cache becomes a step; every other forward runs as it always did, on the same cache. What a step cannot
serve is known before a call begins, and the reason is kept in ``DecodeStepper.reason``.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from airllm import transformers_private as private
from airllm.experts.device_engine import MAX_ROWS, DeviceEngine
from airllm.experts.side_stream import on_stream
from airllm.experts.switched_off import no_collector, no_cudnn_attention
from airllm.recorded_layers import SameSettings, Unchanged
from airllm.run_ahead import RunAhead
from airllm.step_cache import StepCache
from airllm.step_plan import cache_name
from airllm.step_state import StepPlan, StepState
from airllm.streaming import LayerWatch

log = logging.getLogger(__name__)

CAPACITY_STEP = 256
"""Caches come in multiples of this many positions, so that calls of like length share one recording."""
MAX_CACHE_BYTES = 2**30
"""Of one call's cache, and of all that is kept between calls."""
MAX_STATES = MAX_ROWS
"""Numbers of rows whose cache and recording are kept, so that calls of different batches in turn record nothing anew."""
UNPLANNED_TOKENS = 4096
"""Beyond so many positions cuDNN's faster attention gains a prompt more than its plan costs; see `no_cudnn_attention`."""
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_READ = {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}


StepForward = Callable[[StepState], tuple[torch.Tensor, list[torch.Tensor]]]
"""A step's logits [B, 1, vocabulary] and the hidden states after each layer, computed in place of the model's own forward."""


class DecodeStepper:
    """Turns the decoded tokens of ``generate`` into steps. One call at a time: whoever calls holds the guard's lock.

    Args:
        watch: learns each layer's output.
        plan: see `airllm.step_plan.plan_steps`.
        fused: computes a step in place of the model's own forward.
        ahead: steps may be launched before they are asked for (on a GPU); whoever times each forward wants none.

    A call of generate is not served by steps while the model's modules, weights and hooks are not as they were when this was
    made. Nothing here holds the model, so that dropping the model frees its memory at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: DeviceEngine,
        watch: LayerWatch,
        plan: StepPlan,
        fused: StepForward | None = None,
        ahead: bool = True,
    ) -> None:
        self.engine, self._plan = engine, plan
        self._fused, self._unchanged, self._same_settings = fused, Unchanged(model), SameSettings(model)
        self.reason = "no call of generate yet"
        self.steps = self.captures = 0
        self._model = weakref.ref(model)
        self._forward = type(model).forward
        self.cache_name = cache_name(model)
        self._watch = watch
        self._states: list[StepState] = []  # at most one for each number of rows; the one used last is the last
        self._active: StepState | None = None
        self._thread: int | None = None
        self._greedy = False
        self._broken = ""
        self._stream = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None
        self._ahead = RunAhead(self._stream, allowed=ahead)
        private.replace_cache_preparation(model, self._prepare)

    # --- around generate ----------------------------------------------------------------------------------------------

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Inside, this thread's call of generate may become steps; one made within it (by a streamer, say) goes the plain way,
        since there is one set of fixed tensors for both."""
        outer = self._thread, self._active, self._greedy
        nested = self._thread is not None
        self._thread, self._active = (None, None) if nested else (threading.get_ident(), None)
        if not nested:
            self.reason = "generate failed before its cache was made"
        try:
            yield
        finally:
            self._thread, self._active, self._greedy = outer if nested else (None, None, False)
            self._ahead.finish()

    def hand_out(self, result: Any) -> Any:
        """What generate gives its caller: a cache in it must not be the one that the next call writes into."""
        cache, model = getattr(result, self.cache_name, None), self._model()
        if isinstance(cache, StepCache) and model is not None:
            result[self.cache_name] = cache.as_dynamic(model.config)
        return result

    def _prepare(self, original: Callable[..., Any], *call: Any) -> Any:
        """Stands before generate's own making of a cache; ``call`` is (config, model_kwargs, mode, batch, max length)."""
        if self._thread != threading.get_ident():
            return original(*call)
        self._ahead.drop()
        config, model_kwargs, mode, batch, max_length = call
        batch *= max(config.num_return_sequences or 1, config.num_beams or 1)
        self.reason = self._refuse(config, model_kwargs, mode, batch, max_length + 1)
        self._greedy = getattr(mode, "value", mode) == "greedy_search"
        self._ahead.until = max_length if self._greedy else 0
        if not self.reason:
            self._active = self._state_for(batch, max_length + 1)
        if self._active is None:
            return original(*call)
        model_kwargs[self.cache_name] = self._active.cache
        return None

    def _refuse(self, config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, length: int) -> str:
        if self._broken:
            return self._broken
        if not self._unchanged:
            return "the model's modules were changed, or hooks were put into them"
        if not self._same_settings:
            return "settings of the model's modules or of its configuration were changed after loading"
        name, model = getattr(mode, "value", mode), self._model()
        if name not in _MODES:
            return f"generation mode {name!r}"
        if model is None or config.use_cache is False or model_kwargs.get("use_cache") is False:
            return "use_cache=False"
        if getattr(config, "prefill_chunk_size", None) == 1:
            return "prefill_chunk_size=1"  # a prompt's tokens would look like new ones
        if config.cache_implementation not in (None, "dynamic") or model_kwargs.get(self.cache_name) is not None:
            return "a cache of the caller's choice"
        wanted = [key for key in ("output_attentions", "output_hidden_states") if getattr(config, key, None)]
        if model_kwargs.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
            wanted.append("output_router_logits")
        if wanted:
            return f"{', '.join(wanted)} asked for"
        for name in ("attention_mask", "position_ids"):
            dimensions = getattr(model_kwargs.get(name), "ndim", 2)
            if dimensions != 2:
                return f"{name} of {dimensions} dimensions"
        return self._too_large(model, batch, length)

    def _too_large(self, model: PreTrainedModel, batch: int, length: int) -> str:
        if not self.engine.fits(batch):
            places, most = self.engine.tables.most_ids(), min(batch * self.engine.top_k, self.engine.num_experts)
            return (
                f"a batch of {batch} sequences, which may use {most} experts in a layer: up to {MAX_ROWS} sequences and "
                f"{places} experts are served"
            )
        positions = _rounded(length)
        need = self._plan.cache_bytes(batch, positions, model.dtype.itemsize)
        if need > MAX_CACHE_BYTES:
            return f"a static cache of {need} B for {batch} x {positions} positions, above the limit of {MAX_CACHE_BYTES} B"
        return ""

    def _state_for(self, batch: int, length: int) -> StepState | None:
        """The fixed tensors for a call: kept ones if they fit, else new ones; None when memory does not suffice."""
        state = next((kept for kept in self._states if kept.batch == batch and kept.capacity >= length), None)
        if state is None:
            # Before the new ones are made: both need not fit.
            self._forget([kept for kept in self._states if kept.batch == batch])
            self._forget(self._states[: 1 - MAX_STATES])
            state = self._new_state(batch, length)
            if state is None:
                return None
            while self._states and sum(kept.nbytes for kept in (*self._states, state)) > MAX_CACHE_BYTES:
                self._forget(self._states[:1])
        else:
            self._states.remove(state)
        self._states.append(state)
        state.reset()
        return state

    def _forget(self, states: list[StepState]) -> None:
        """Give their caches and recordings back: the allocator keeps a recording's memory for nobody until it is emptied."""
        self._ahead.drop()
        recorded = any(state.graph is not None for state in states)
        self._states = [kept for kept in self._states if kept not in states]
        for state in states:
            state.graph, state.output, state.watched = None, None, []
        if recorded:
            torch.cuda.empty_cache()

    def _new_state(self, batch: int, length: int) -> StepState | None:
        """Made of what memory there is, else of what those that are kept give back."""
        model = self._model()
        assert model is not None
        for _ in range(2):
            try:
                state = StepState(model, self._plan, batch, _rounded(length), self.engine.device)
            except torch.OutOfMemoryError as error:
                self.reason = f"no memory for a static cache of {batch} x {length} positions ({error})"
                self._forget(self._states)
            else:
                self.reason = ""
                return state
        return None

    @property
    def checks_late(self) -> bool:
        """See `airllm.guard.Stepper`."""
        return self._greedy and self._active is not None and self._active.begun

    # --- one forward ---------------------------------------------------------------------------------------------------

    def run(self, plain: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the model: as a step if it is one, else by calling ``plain``."""
        state = self._active
        if state is None or kwargs.get(self.cache_name) is not state.cache:  # a forward of somebody else's
            self._ahead.drop()
            return plain()
        if not self._is_step(state, args, kwargs):
            self._ahead.drop()
            # The prompt of a call whose tokens will be steps, which round in an order of their own; all else is left to torch.
            with no_cudnn_attention() if _new_positions(kwargs) + state.cache.seen <= UNPLANNED_TOKENS else nullcontext():
                return plain()
        output = None
        try:
            output = self._step(state, kwargs)
            self._ahead.start(self._launch, state, output.logits, kwargs["input_ids"], kwargs["position_ids"])
        except CaptureError as error:
            self._give_up(f"recording failed: {error}")
        except torch.OutOfMemoryError as error:
            self._give_up(f"a step ran out of memory: {error}")
        except BaseException:
            self.engine.abandon()
            self._forget([state])
            self._active = None
            raise
        return plain() if output is None else output  # a step that was computed is not to be computed again

    def _give_up(self, reason: str) -> None:
        log.warning("decoded tokens take the plain way from now on: %s", reason)
        self.reason = self._broken = reason
        self.engine.abandon()
        self._forget(self._states)
        self._active = None

    def _is_step(self, state: StepState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        ids = kwargs.get("input_ids")
        if args or ids is None or tuple(ids.shape) != (state.batch, 1):
            return False
        if not 0 < state.cache.seen < state.capacity or kwargs.get("use_cache") is False or kwargs.get("return_dict") is False:
            return False
        odd = [name for name in ("attention_mask", "position_ids") if getattr(kwargs.get(name), "ndim", 2) != 2]
        odd += [
            name
            for name, value in kwargs.items()
            if name not in _READ and name != self.cache_name and value is not None and value is not False
        ]
        if kwargs.get("position_ids") is None:  # the model would make its own, by a rule that may be its own
            self.reason = "the model's forward is called without position_ids"
            return False
        if odd:
            self.reason = f"the model's forward is called with {', '.join(odd)} of a kind that steps do not take"
        return not odd

    def _step(self, state: StepState, kwargs: dict[str, Any]) -> Any:
        self.engine.enter()
        ids, positions = kwargs["input_ids"], kwargs["position_ids"]
        if not self._ahead.take(state, ids, positions):
            state.load(ids, positions, kwargs.get("attention_mask"))
            if state.graph is None and state.warm and self._stream is not None:
                self._capture(state)
            with on_stream(self._stream):  # also before it records: libraries keep workspaces by stream
                self._launch(state)
        fields = {name: value for name, value in state.output.items() if name != "logits"}
        output = type(state.output)(logits=state.output.logits.clone(), **fields)
        state.cache.advance(1)
        self.steps += 1
        return output

    def _launch(self, state: StepState) -> None:
        """From the state's inputs to its ``output``."""
        if state.graph is None:
            state.output = self._body(state)
            state.warm = True
        else:
            state.graph.replay()
            self._watch.show(state.watched)

    def look_back(self) -> None:
        """See `airllm.guard.Stepper`."""
        if self._ahead.overwritten:
            self.engine.enter()
            self._ahead.go_back(self._launch)

    def _body(self, state: StepState) -> Any:
        """The step itself, from and to fixed tensors."""
        model = self._model()
        if self._fused is not None:
            with torch.no_grad():
                logits, after = self._fused(state)
            self._watch.show(after)
            fields: dict[str, Any] = {self.cache_name: state.cache}
            return MoeCausalLMOutputWithPast(logits=logits, **fields)
        with torch.no_grad(), self.engine.step(), state.cache.writing_at(state.slot):
            return self._forward(
                model,
                input_ids=state.ids,
                attention_mask=state.masks(),
                position_ids=state.positions,
                use_cache=True,
                return_dict=True,
                **{self.cache_name: state.cache},
            )

    def _capture(self, state: StepState) -> None:
        """Record the step. Nothing runs: the tables and the slots stay as they are."""
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self.engine.device)

        def record() -> Any:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                output = self._body(state)
            except BaseException:
                with suppress(RuntimeError):  # a broken recording cannot be ended cleanly; the first error is the one to show
                    graph.capture_end()
                raise
            graph.capture_end()
            return output

        try:
            with no_collector(), on_stream(self._stream):
                state.output = record()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        state.graph, state.watched = graph, self._watch.shown()
        state.graph_bytes = max(0, torch.cuda.memory_reserved(self.engine.device) - before)  # a recording has a pool of its own
        self.captures += 1

    def stats(self) -> dict[str, Any]:
        """How decoded tokens went: steps since loading, recordings made, and why the latest call was not (all) steps."""
        return {
            "device_engine_reason": self.reason,
            "device_engine_steps": self.steps,
            "device_engine_steps_ahead": self._ahead.launched,
            "device_engine_steps_discarded": self._ahead.discarded,
            "device_engine_captures": self.captures,
            "device_engine_kernels": self.engine.ops.NAME,
            "device_engine_fused": self._fused is not None,
            "step_cache_bytes": sum(state.cache.nbytes for state in self._states),
            "step_graph_bytes": sum(state.graph_bytes for state in self._states),
        }

    def close(self) -> None:
        """Give the caches and the recordings back. Idempotent."""
        self._forget(self._states)
        self._active = None
        self._broken = "the model is closed"


class CaptureError(RuntimeError):
    """A step could not be recorded. Never leaves this module."""


def _new_positions(kwargs: dict[str, Any]) -> int:
    """How many a forward computes."""
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    return 0 if tokens is None else int(tokens.shape[1])


def _rounded(length: int) -> int:
    return -(-length // CAPACITY_STEP) * CAPACITY_STEP
