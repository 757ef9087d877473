"""Where gradients are added up outside autograd: one tensor per parameter, in fp32 at least."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 as it is, everything else fp32: sums of bf16 lose whole percents to cancellation."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class GradientSum:
    """sum_i c_i grad L_i in buffers of its own; a parameter that nothing was added to has none."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._held: dict[str, Tensor] = {}

    def slot(self, name: str) -> Tensor:
        """The buffer of one parameter, to be added to in place."""
        if name not in self._held:
            parameter = self._parameters[name]
            self._held[name] = torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype))
        return self._held[name]

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add gradients given by parameter name; None adds nothing."""
        for name, gradient in gradients.items():
            if gradient is not None:
                self.slot(name).add_(gradient)

    def add_to(self, other: GradientSum, coefficient: float) -> None:
        """other += coefficient x this sum."""
        for name, held in self._held.items():
            other.slot(name).add_(held, alpha=coefficient)


class ParameterGradients(GradientSum):
    """The same, in `.grad` itself where its dtype is wide enough; else in a buffer that `flush` rounds into `.grad`."""

    def slot(self, name: str) -> Tensor:
        """`.grad`, made of zeros where there was none, or this parameter's wide buffer."""
        parameter = self._parameters[name]
        if parameter.dtype != wide_dtype(parameter.dtype):
            return super().slot(name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def flush(self) -> None:
        """Add the wide buffers to `.grad`, rounding once, and let go of them."""
        for name, held in self._held.items():
            parameter = self._parameters[name]
            total = held if parameter.grad is None else held.add_(parameter.grad)
            parameter.grad = total.to(parameter.dtype)
        self._held.clear()
