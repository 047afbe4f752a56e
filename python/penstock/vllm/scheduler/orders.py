"""The orders of the next step. All parts of the scheduler half add to them."""

from __future__ import annotations

from penstock.vllm.messages import StepOrders


class Orders:
    """The orders that go to the workers with the next step, and the numbers for jobs."""

    def __init__(self) -> None:
        self.next = StepOrders()
        """The orders of the next step so far."""
        self._numbers = 0

    def number(self) -> int:
        """A new number for a job or a step; never the same twice."""
        self._numbers += 1
        return self._numbers

    def take(self) -> StepOrders:
        """Returns the orders, and begins those of the step after."""
        taken, self.next = self.next, StepOrders()
        return taken
