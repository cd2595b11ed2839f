"""When to launch the step after the one under way: as late as the host can afford.

Whoever arrives before the launch is in that step; who comes after waits for it and the rest of the one under way. But
the device must not run dry, and how long the host takes depends on the rows of the step, on what else its thread has to
do and on who holds the interpreter. So the lead is learnt: a launch that came too late lengthens it at once, every
other one shortens it a little, and about one in fifty is late.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.1
"""Of the expected time of the step under way: expectations are that good."""
FIRST_S, LEAST_S, MOST_S = 0.002, 0.0005, 0.005
SOONER_S, LATER_S = 2.5e-4, 5e-6
"""The lead grows by the one, shrinks by the other: in the long run one launch in 51 is late."""


@dataclass(slots=True)
class LaunchLead:
    """``seconds`` and SHARE before the expected end of a step the next one is launched. ``num_late``: launches that the
    device waited for."""

    seconds: float = FIRST_S
    num_late: int = 0

    def wait_s(self, expected_s: float) -> float:
        """From the beginning of a step that is expected to take so long, to the launch of the next."""
        return (1 - SHARE) * expected_s - self.seconds

    def learn(self, late: bool) -> None:
        """``late``: the step under way was over when the next one had been launched."""
        self.num_late += late
        change = SOONER_S if late else -LATER_S
        self.seconds = min(MOST_S, max(LEAST_S, self.seconds + change))
