"""Rotary frequencies with the long-context scalings in use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gapless.arch.spec import RopeSpec


def plain(theta: float, rotary_dim: int, factors: Sequence[float] | float = 1.0, scale: float = 1.0) -> RopeSpec:
    """``theta ** (-2 i / rotary_dim)``, each divided by its factor."""
    half = rotary_dim // 2
    by = [factors] * half if isinstance(factors, int | float) else list(factors)
    return RopeSpec(tuple(theta ** (-2 * i / rotary_dim) / by[i] for i in range(half)), scale)


def llama3(
    theta: float, rotary_dim: int, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> RopeSpec:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, those between blended (Meta's llama-models)."""
    scaled = []
    for frequency in plain(theta, rotary_dim).inv_freq:
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low_freq_factor:
            frequency /= factor
        elif wavelength >= original / high_freq_factor:
            smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        scaled.append(frequency)
    return RopeSpec(tuple(scaled))


def longrope_scale(context: int, original: int) -> float:
    """LongRoPE's attention factor (arXiv 2402.13753): sqrt(1 + ln s / ln original), s = context / original."""
    s = context / original
    return 1.0 if s <= 1 else math.sqrt(1 + math.log(s) / math.log(original))


def yarn(
    theta: float, rotary_dim: int, factor: float, original: int, beta_fast: float, beta_slow: float, scale: float | None
) -> RopeSpec:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, ramp between."""

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(beta_fast)), 0)
    high = min(math.ceil(dimension(beta_slow)), rotary_dim - 1)
    frequencies = []
    for i, frequency in enumerate(plain(theta, rotary_dim).inv_freq):
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        frequencies.append(frequency / factor * ramp + frequency * (1 - ramp))
    found = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return RopeSpec(tuple(frequencies), found if scale is None else scale)
