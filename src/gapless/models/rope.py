"""Rotary frequencies with the long-context scalings in use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gapless.arch.spec import RopeSpec
from gapless.errors import ModelFileError
from gapless.models.fields import Fields

SMALLEST, LARGEST = 1e-30, 1e30  # frequencies and scales that single precision computes with


def theta_of(fields: Fields, key: str, default: float) -> float:
    """The base of the frequencies: they fall from 1 to its inverse, and YaRN takes its logarithm."""
    return fields.number(key, default, low=1.0)


def factor_of(fields: Fields, key: str) -> float:
    """By how much a context is stretched."""
    return fields.number(key, low=1e-6, high=1e6)


def scale_of(fields: Fields, key: str, default: float) -> float:
    """What cosines and sines are multiplied by."""
    return fields.number(key, default, low=1e-3, high=1e3)


def pairs_of(dims: int, fields: Fields, key: str) -> int:
    """The dimensions that are rotated, an even number. Raises ModelFileError if none are."""
    if dims < 2:
        raise fields.error(key, dims, "enough to rotate two dimensions of a head")
    return dims - dims % 2


def checked(found: RopeSpec, where: str) -> RopeSpec:
    """Raises ModelFileError unless all frequencies, and the scale, are numbers to compute with."""
    for value in (*found.inv_freq, found.scale):
        if not SMALLEST < value < LARGEST:
            raise ModelFileError(
                f"{where}: the rope fields lead to the frequency or scale {value:g}",
                "use an unmodified copy of the model",
            )
    return found


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


def yarn_scale(factor: float) -> float:
    """YaRN's attention factor where a model gives none."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def yarn(
    theta: float, rotary_dim: int, factor: float, original: int, beta_fast: float, beta_slow: float, scale: float
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
    return RopeSpec(tuple(frequencies), scale)
