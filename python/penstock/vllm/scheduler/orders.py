"""The orders of the next step, as the rooms of the scheduler half fill them in."""

from __future__ import annotations

from penstock.vllm.messages import StepOrders


class Orders:
    """What goes to the workers with the next step, and the numbers of jobs."""

    def __init__(self) -> None:
        self.next = StepOrders()
        """Those being made."""
        self._numbers = 0

    def number(self) -> int:
        """A number for a job or a step that was never given before."""
        self._numbers += 1
        return self._numbers

    def take(self) -> StepOrders:
        """Hands over the orders and begins with the next."""
        taken, self.next = self.next, StepOrders()
        return taken
