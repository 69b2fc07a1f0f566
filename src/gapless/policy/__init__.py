"""Who goes first, and who gives way: one file for each policy."""

from __future__ import annotations

from typing import Protocol

from gapless.request import Request


class Policy(Protocol):
    def key(self, request: Request) -> tuple[int, ...]:
        """Requests are admitted, and keep their pages, by rising key. Keys are distinct."""
        ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may preempt a running one to be admitted."""
        ...


def by_name(name: str) -> Policy:
    """ "fcfs" or "priority". Raises RequestError."""
    from gapless.errors import RequestError
    from gapless.policy.fcfs import Fcfs
    from gapless.policy.priority import Priority

    policies: dict[str, Policy] = {"fcfs": Fcfs(), "priority": Priority()}
    if not isinstance(name, str) or name not in policies:
        raise RequestError(f"policy = {name!r} is not known", f"choose one of {', '.join(policies)}")
    return policies[name]
