"""Where the bytes of a KV cache lie, and how they are cut into objects.

>>> from penstock.layout import Descriptor
>>> cross_layer = Descriptor.packed(
...     "BLHNC", (0, 8, 0, 4), blocks=10, tokens=16, content_bytes=256
... )
>>> cross_layer.segments(3, (0, 8, 0, 4))
[(0, 393216, 131072)]
>>> per_layer = Descriptor.packed("LBHNC", (0, 8, 0, 4), blocks=10, tokens=16, content_bytes=256)
>>> len(per_layer.segments(3, (0, 8, 0, 4)))
8
"""

from penstock._native import Descriptor, TensorView, check_ranks, objects

__all__ = ["Descriptor", "TensorView", "check_ranks", "objects"]
