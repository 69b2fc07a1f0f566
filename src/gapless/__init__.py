"""gapless: LLM inference that waits least. ``LLM`` and ``SamplingParams`` are imported when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.llm import LLM as LLM
    from gapless.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from gapless.llm import LLM

        return LLM
    if name == "SamplingParams":
        from gapless.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'gapless' has no attribute {name!r}")
