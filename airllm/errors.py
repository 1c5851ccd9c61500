"""Every exception this package raises on purpose.

Each message carries the number, its unit and what to do about it. The classes also derive from the built-in that a
caller would expect (``ValueError`` for a refused option, ``MemoryError`` for a host that is too small), so existing
``except`` clauses keep working.
"""

from __future__ import annotations


class AirLLMError(Exception):
    """Base of all errors raised by airllm."""


class NotEnoughSpaceException(AirLLMError):
    """The disk cannot take the split that was asked for. The name is that of AirLLM's own exception."""


class CheckpointError(AirLLMError, ValueError):
    """A checkpoint file is missing, cut short, or not what its header says."""


class WeightMapError(CheckpointError):
    """The checkpoint's tensors do not fit the model: missing, unknown, or of another shape."""


class OptionError(AirLLMError, ValueError):
    """A keyword is unknown, of the wrong kind, or contradicts another one."""


class BudgetError(AirLLMError, ValueError):
    """The expert budget cannot hold the experts of one token in one layer."""


class DeviceError(AirLLMError, ValueError):
    """The device asked for is not there, or cannot do what was asked."""


class UnsupportedModelError(AirLLMError, ValueError):
    """The model does not fit the backend asked for; the message names what is missing."""


class HostMemoryError(AirLLMError, MemoryError):
    """The host has too little memory for the expert bank, or for layers kept beside it."""


class NonFiniteError(AirLLMError, ArithmeticError):
    """A layer produced infinities or NaN; the message names the first one that did."""
