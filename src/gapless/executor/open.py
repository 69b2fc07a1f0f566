"""Open an executor for a loaded model, with a cache that fits its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gapless.arch.spec import ModelSpec
from gapless.errors import GaplessError, ResourceError, UnsupportedModelError
from gapless.executor.protocol import Executor
from gapless.kernels.sampling_reference import MAX_VOCAB
from gapless.models.load import LoadedModel
from gapless.models.memory import available_bytes, check_memory

if TYPE_CHECKING:  # the kernels' modules are imported by those who run them
    from gapless.kernels.cpu.kv import KvDtype

PAGE_TOKENS = 16
REQUEST_TOKENS = 2048  # that the cache has room for, times the requests that run at once
LONGEST_TOKENS = 1 << 20  # that a model's own claim makes room for: each page has its entry in the scheduler
MEMORY_SHARE = 4  # one part in so many of the memory is the cache's, unless it is told otherwise


def open_cpu(
    model: LoadedModel,
    *,
    context_tokens: int | None,
    max_running: int,
    max_step_tokens: int,
    kv_memory_bytes: int | None,
    kv_dtype: KvDtype,
    threads: int | None,
    isa: str | None,
    depth: int | None,
    float_weights: bool,
    progress: Callable[[str], None] | None,
) -> Executor:
    """The compiled executor. Raises GaplessError for an unknown option, ResourceError where memory does not suffice."""
    _check_vocabulary(model.spec)
    from gapless.executor.cpu import CpuExecutor
    from gapless.kernels.cpu.kv import page_bytes

    size = page_bytes(model.spec, kv_dtype)
    n_pages = cache_pages(
        size,
        model_context=model.spec.context_tokens,
        context_tokens=context_tokens,
        max_running=max_running,
        kv_memory_bytes=kv_memory_bytes,
        available=available_bytes() - model.weights_bytes,
    )
    check_memory(
        model.weights_bytes + n_pages * size,
        f"model {model.name!r} with its cache",
        "use a smaller model, context or kv-memory",
    )
    return CpuExecutor(
        model.spec,
        model.weights,
        n_pages=n_pages,
        n_slots=max_running,
        max_step_tokens=max(max_step_tokens, max_running),
        context_tokens=min(context_tokens or model.spec.context_tokens, model.spec.context_tokens),
        kv_dtype=kv_dtype,
        threads=threads,
        isa=isa,
        depth=depth,
        float_weights=float_weights,
        progress=progress,
    )


def open_reference(
    model: LoadedModel, *, context_tokens: int | None, max_running: int, max_step_tokens: int
) -> Executor:
    """The NumPy executor, with room for four requests of at most 4,096 tokens."""
    _check_vocabulary(model.spec)
    from gapless.executor.reference import ReferenceExecutor

    context = min(context_tokens or model.spec.context_tokens, model.spec.context_tokens, 4096)
    return ReferenceExecutor(
        model.spec,
        model.weights,
        n_pages=4 * -(-context // PAGE_TOKENS),
        n_slots=max_running,
        max_step_tokens=max_step_tokens,
        kv_dtype="f16",
    )


def _check_vocabulary(spec: ModelSpec) -> None:
    if spec.vocab_size > MAX_VOCAB:
        raise UnsupportedModelError(
            f"a vocabulary of {spec.vocab_size} tokens is more than the sampler can add up exactly",
            f"use a model of at most {MAX_VOCAB}",
        )


def cache_pages(
    page_bytes: int,
    *,
    model_context: int,
    context_tokens: int | None,
    max_running: int,
    kv_memory_bytes: int | None,
    available: int,
) -> int:
    """Pages of the cache.

    Without ``kv_memory_bytes``: enough for ``max_running`` requests of 2,048 tokens, or for one of the whole context
    (up to a million tokens) if that is more, within a quarter of the memory available. A context that was asked for has
    room whatever it takes; the model's own is cut to what fits.

    Raises:
        ResourceError: the context that was asked for does not fit ``kv_memory_bytes``.
        GaplessError: ``kv_memory_bytes`` is too small for anything.
    """
    context = min(context_tokens or model_context, model_context)
    whole = -(-context // PAGE_TOKENS)
    asked = whole if context_tokens is not None else min(whole, 4)
    if kv_memory_bytes is None:
        sensible = max(
            min(whole, LONGEST_TOKENS // PAGE_TOKENS), max_running * -(-min(context, REQUEST_TOKENS) // PAGE_TOKENS)
        )
        return max(asked, min(sensible, max(available, 0) // MEMORY_SHARE // page_bytes))
    n_pages = kv_memory_bytes // page_bytes
    if n_pages < 2:
        raise GaplessError(
            f"kv-memory = {kv_memory_bytes} bytes holds less than two pages of {page_bytes} bytes", "raise it"
        )
    if context_tokens is not None and n_pages < whole:
        raise ResourceError(
            f"context = {context} tokens needs {whole * page_bytes} bytes of cache and kv-memory = {kv_memory_bytes}",
            "raise kv-memory or lower the context",
        )
    return n_pages
