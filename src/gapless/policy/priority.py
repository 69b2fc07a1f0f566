"""Higher priority first, then first come. A request of higher priority displaces one of lower."""

from __future__ import annotations

from gapless.request import Request


class Priority:
    def key(self, request: Request) -> tuple[int, ...]:
        return (-request.priority, request.arrival)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.priority > running.priority
