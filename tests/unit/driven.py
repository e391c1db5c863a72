"""What the controller's tests share: keys, a controller, and a data plane that always says yes."""

from __future__ import annotations

from hicache.control import ControlConfig, Controller
from hicache.keys import Namespace, page_keys
from hicache.records import Done, JobKind

SPACE = Namespace.of({"weights": "w"})


def keys(pages: int, start: int = 0) -> list[bytes]:
    return page_keys(SPACE.root, range(start, start + pages), 1)


def controller(**config) -> Controller:
    return Controller(ControlConfig(**{"host_slots": 8, **config}), lambda: 0.0)


def run(control: Controller, bad=None, found: int = 0) -> list:
    """Run and apply everything there is."""
    events = []
    while True:
        jobs = control.take_jobs().jobs
        events += control.apply(
            [
                Done(j.id, bad=(bad or {}).get(j.kind, {}), found=found if j.kind is JobKind.LOOKUP else 0)
                for j in jobs
            ]
        )
        if not jobs:
            control.check()
            return events


def publish(control: Controller, name, chain) -> None:
    request = control.open(name, SPACE, chain)
    run(control)
    request.publish(len(chain), range(len(chain)))
    run(control)
    request.close()
    run(control)


def resident(control: Controller, chain) -> int:
    request = control.open(object(), SPACE, chain)
    pages = request.match().ready
    request.close(abort=True)
    run(control)
    return pages
