"""Arrays of token ids and log-probs, as records hold them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Int32 = array[int]
    Float32 = array[float]
else:  # codecs must distinguish the two, and `array[int]` fails at run time before Python 3.12

    class Int32(array):
        """Token ids."""

        __slots__ = ()

    class Float32(array):
        """Log-probs."""

        __slots__ = ()


def int32(values: Any = ()) -> array[int]:
    """Token ids in their stored form: int32, contiguous. Raises OverflowError outside int32."""
    return array("i", values)


def float32(values: Any = ()) -> array[float]:
    """Log-probs in their stored form: float32, contiguous."""
    return array("f", values)
