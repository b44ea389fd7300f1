"""The keys and values of what a decoder has read, so that a further token costs one position and not all of them again.

Shape suffixes: B batch, S new tokens, P tokens in the cache, G key/value heads, C head width.
"""

from torch import Tensor


class LayerCache:
    """The part of one attention layer: keys and values (B, P, G, C), in room for `length` tokens that is taken once."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys_BSGC: Tensor, values_BSGC: Tensor, read: int) -> tuple[Tensor, Tensor]:
        """Put new tokens behind the first `read`, and return the keys and values of all of them, (B, read + S, G, C)."""
        if self._keys is None or self._values is None:
            batch, _, heads, width = keys_BSGC.shape
            self._keys = keys_BSGC.new_empty(batch, self.length, heads, width)
            self._values = values_BSGC.new_empty(batch, self.length, heads, width)
        end = read + keys_BSGC.shape[1]
        self._keys[:, read:end] = keys_BSGC
        self._values[:, read:end] = values_BSGC
        return self._keys[:, :end], self._values[:, :end]


class KVCache:
    """What `GPT.forward(tokens, cache=...)` has read: its next call continues the rows of the one before.

    Args:
        length: how many tokens a row will have in the end, padding included.

    Attributes:
        real: (B, P) bool, which of them are no padding; None before the first call.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.real: Tensor | None = None
        self._layers: dict[int, LayerCache] = {}

    @property
    def read(self) -> int:
        """P, tokens per row so far."""
        return 0 if self.real is None else self.real.shape[1]

    def layer(self, number: int) -> LayerCache:
        """The part of an attention layer, counted from 0."""
        return self._layers.setdefault(number, LayerCache(self.length))
