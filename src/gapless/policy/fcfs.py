"""First come, first served. The latest arrival gives way, so the first always gets to its end."""

from __future__ import annotations

from gapless.request import Request


class Fcfs:
    def key(self, request: Request) -> tuple[int, ...]:
        return (request.arrival,)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return False
