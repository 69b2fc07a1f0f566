"""Errors that users see: each names the field, the value and the remedy."""

from __future__ import annotations


class GaplessError(Exception):
    """An error that a user can act on.

    Args:
        problem: what is wrong, naming the field and the value.
        remedy: what to do about it.
    """

    exit_code = 2

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


class ModelError(GaplessError):
    """A model cannot be found, read or run."""


class ModelFileError(ModelError):
    """A model file is truncated, corrupt or of an unknown format."""


class UnsupportedModelError(ModelError):
    """The file is sound, but the family, tensor type or tokenizer is not known."""


class DownloadError(ModelError):
    """A model could not be fetched or stored."""


class RequestError(GaplessError):
    """A request cannot be served as asked."""


class ResourceError(GaplessError):
    """Memory, disk or pages do not suffice."""


class LedgerFileError(GaplessError):
    """A recorded ledger cannot be read or written."""


class ExecutorError(GaplessError):
    """A step failed on its device."""

    exit_code = 3
