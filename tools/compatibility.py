"""Write docs/compatibility.md from the declarations, or, with --check, say whether it is what they give."""

from __future__ import annotations

import sys
from pathlib import Path

from hicache.resolve.compatibility import page

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main() -> int:
    """Write or check the page."""
    text = page((DOCS / "compatibility.in.md").read_text(encoding="utf-8"))
    target = DOCS / "compatibility.md"
    if "--check" not in sys.argv[1:]:
        target.write_text(text, encoding="utf-8")
        return 0
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        return 0
    print("docs/compatibility.md is stale: run tools/compatibility.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
