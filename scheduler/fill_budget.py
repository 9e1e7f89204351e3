"""How many background fills fit between two layers, learned from how many landed.

What does not land in time gives its slot back, and its victim is gone for nothing. So no more are begun than landed
lately, and after a gap in which none did, ever more gaps are left out.
"""

from __future__ import annotations

MOST_AT_ONCE = 16
LONGEST_PAUSE = 64  # gaps left out between two attempts at most


class FillBudget:
    """The number of fills to begin in the next gap.

    Attributes
    ----------
    most : int
        Fills to begin at most.
    """

    def __init__(self) -> None:
        self.most = 1
        self._pause = self._left = 0

    def allows(self) -> bool:
        """Whether the gap that begins now is used; asked once a gap."""
        if self._left > 0:
            self._left -= 1
            return False
        return True

    def learn(self, begun: int, landed: int) -> None:
        """Of so many fills begun in a gap so many landed in it."""
        if landed == 0:
            self.most = 1
            self._pause = min(LONGEST_PAUSE, max(1, 2 * self._pause))
            self._left = self._pause
            return
        self._pause = 0
        if landed < begun:
            self.most = landed
        elif begun == self.most:
            self.most = min(MOST_AT_ONCE, 2 * begun)
