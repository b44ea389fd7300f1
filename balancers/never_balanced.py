"""A warning for the quietest fault of all: balancers that are built and never updated."""

import warnings

import torch
from torch import Tensor


class NeverBalanced:
    """Warns, once, when training goes on and `balance_step` is never called: the balancers would silently do nothing.

    An optimizer step is seen by the gate's weight having changed in place. Where that cannot be seen (no gate, a frozen one, an
    optimizer that hides it), many forwards without a step will do. Compiled code does not ask.
    """

    STEPS = 3  # a test or a manual edit may touch the weight once or twice; three steps are a training run
    FORWARDS = 256  # more microbatches than anybody accumulates into a first step

    def __init__(self) -> None:
        self.version: int | None = None
        self.steps = self.forwards = 0
        self.silent = False

    def check(self, gate: Tensor | None, waiting: list[str]) -> None:
        """Called once per training forward with the gate's weight and the names of the balancers that wait for a step."""
        if self.silent or torch.compiler.is_compiling():
            return
        self.forwards += 1
        if gate is not None:
            self.steps += self.version is not None and gate._version != self.version
            self.version = gate._version
        if self.steps >= self.STEPS or self.forwards >= self.FORWARDS:
            self.silent = True
            if waiting:
                warnings.warn(
                    f"a Router with {', '.join(waiting)} has trained for {self.forwards} microbatches without balance_step: "
                    "its balancers never change. Call evenload.balance_step(model) once per optimizer step, or "
                    "evenload.attach(model, optimizer) once.",
                    stacklevel=2,
                )
