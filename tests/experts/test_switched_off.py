"""Settings of the whole process that are off for a while."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from airllm.experts.switched_off import SwitchedOff, no_collector, no_cudnn_attention

SETTINGS: dict[str, tuple[SwitchedOff, Callable[[], bool], Callable[[bool], object]]] = {
    "collector": (no_collector, gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "cuDNN's attention": (
        no_cudnn_attention,
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.enable_cudnn_sdp,
    ),
}


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Iterator[tuple[SwitchedOff, Callable[[], bool], Callable[[bool], object]]]:
    off, is_on, switch = SETTINGS[request.param]
    before = is_on()
    switch(True)
    yield off, is_on, switch
    switch(before)


def test_a_setting_stays_off_as_long_as_anybody_needs_it(setting) -> None:  # type: ignore[no-untyped-def]
    off, is_on, _ = setting
    first, second = off(), off()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # another thread's ends in between
    assert not is_on()
    second.__exit__(None, None, None)
    assert is_on()


def test_it_comes_back_after_an_error(setting) -> None:  # type: ignore[no-untyped-def]
    off, is_on, _ = setting
    with pytest.raises(KeyboardInterrupt), off():
        assert not is_on()
        raise KeyboardInterrupt
    assert is_on()


@pytest.mark.parametrize("when", ["off", "on"])
def test_what_an_interrupt_left_off_is_on_again_after_the_next(when: str) -> None:
    state, interrupts = [True], [KeyboardInterrupt()]

    def switch(on: bool) -> None:
        if not on:
            state[0] = on
        if on == (when == "on") and interrupts:
            raise interrupts.pop()
        state[0] = on

    off = SwitchedOff(lambda: state[0], switch)
    with pytest.raises(KeyboardInterrupt), off():
        pass
    assert state == [when == "off"]
    with off():
        assert state == [False]
    assert state == [True]


def test_cudnn_stays_where_nothing_else_is_allowed() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), no_cudnn_attention():
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_what_somebody_else_switched_off_stays_off(setting) -> None:  # type: ignore[no-untyped-def]
    off, is_on, switch = setting
    switch(False)
    with off():
        pass
    assert not is_on()
