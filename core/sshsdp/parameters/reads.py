"""What parameters are gathered for.

Note: what a gather is for. Some formats read other bytes in forward than in backward. Whoever asks
for parameters says which of the two comes, and gets what is not there yet.
"""

from enum import Flag

__all__ = ["Reads"]


class Reads(Flag):
    """What parameters are gathered for."""

    NOTHING = 0
    FORWARD = 1
    BACKWARD = 2
    BOTH = 3
