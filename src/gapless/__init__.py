"""gapless: LLM inference that waits least."""

__version__ = "0.1.0"
