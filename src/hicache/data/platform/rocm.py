"""The ROCm platform, as far as it is declared: what it provides when everything is there, and what is found here."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from hicache.capability import ABILITIES, PINNING, SAME_ADDRESS, TRITON, Capabilities

DECLARED = Capabilities(
    platform="rocm",
    abilities=frozenset(ABILITIES) - {SAME_ADDRESS},
    missing={SAME_ADDRESS: "rocm: registered memory may have another address on the device than on the host"},
)

PINNED_PROBE_NBYTES = 1 << 20


def detect() -> Capabilities:
    """What ROCm can do here, asked of torch; ``absent`` says why there is none."""
    try:
        import torch
    except ImportError as error:
        return replace(DECLARED, absent=f"torch cannot be imported: {error}")
    if not torch.version.hip:
        return replace(DECLARED, absent="this torch is not built for ROCm")
    if not torch.cuda.is_available():
        return replace(DECLARED, absent=f"torch {torch.__version__} sees no ROCm device")
    found = DECLARED
    if find_spec("triton") is None:
        found = found.without((TRITON,), "is not installed")
    try:
        torch.empty(PINNED_PROBE_NBYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        found = found.without((PINNING,), f"is refused: {str(error).splitlines()[0]}")
    return found


def drivers() -> dict[str, str]:
    """What stands between us and the device, by version; empty where there is none."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.version.hip or not torch.cuda.is_available():
        return {}
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"torch": str(torch.__version__), "hip": str(torch.version.hip), "devices": ", ".join(names)}
