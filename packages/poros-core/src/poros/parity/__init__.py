"""Gates that can fail: bitwise comparisons of streamed, resident, restarted and plain runs."""

from poros.parity.compare import Verdict, bitwise_equal, compare
from poros.parity.trajectory import Trajectory

__all__ = ["Trajectory", "Verdict", "bitwise_equal", "compare"]
