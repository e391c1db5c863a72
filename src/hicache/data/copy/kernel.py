"""The Triton copy engine: ``kernel`` on CUDA and ROCm. Declared here; the engine itself is not written yet.

One source for both platforms: a strided gather and scatter whose lists of slots lie on the device, reading and
writing page-locked host memory. Write-back of a page-major layout goes through a staging ring in device memory,
from where whole pages are copied by the runtime, which takes the host's slots as the host's numbers.
"""

from __future__ import annotations

from hicache.capability import (
    HOST_ACCESS,
    PINNING,
    STAGED,
    STREAMS,
    TRITON,
    EngineDeclaration,
    Kernel,
    Place,
)
from hicache.layout import Layout, place
from hicache.spec import CacheSpec


def _limit(spec: CacheSpec, layout: Layout) -> str | None:
    """The staging ring holds a page token by token, so layers may not lie outside tokens in a page-major layout."""
    if not layout.page_major:
        return None
    for group in spec.groups:
        for placed in place(group, layout, 1).planes:
            step = placed.layer_stride
            if placed.token_stride and step is not None and step > placed.token_stride:
                return (
                    f"triton stages pages token by token, and {layout.name} keeps each layer of a page together: "
                    "that is what direct moves best"
                )
    return None


_READS = (STREAMS, TRITON, PINNING, HOST_ACCESS)
_STRIDED = Kernel("strided gather and scatter", Place.DEVICE, Place.DEVICE, _READS)

DECLARATION = EngineDeclaration(
    name="triton",
    io="kernel",
    platforms=frozenset({"cuda", "rocm"}),
    factory="hicache.data.copy.kernel:TritonEngine",
    load=_STRIDED,
    save=_STRIDED,
    save_pages=Kernel("staged write-back", Place.DEVICE, Place.HOST, (STREAMS, TRITON, PINNING, STAGED)),
    limit=_limit,
    imports=("torch", "triton"),
)
