"""Which attention runs here: the kernel of the platform where it proves itself on a small example, else XLA.

Trying means running and failing, so it cannot happen inside the mathematics; it happens once a process, before weights are
loaded. Every process of a run must see the same kind of device, and then comes to the same choice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jax_ppo.models import attention
from jax_ppo.models.layers import QwenConfig
from jax_ppo.sharding import AXES
from jax_ppo.types import InputError

# Kernel -> the backend of JAX that it is for, and its name.
KERNELS = {"splash": ("tpu", "a TPU"), "cudnn": ("gpu", "a CUDA GPU")}
# Of the largest entry. Rounding to bfloat16 stays below; a lost mask or a wrong scale is far beyond.
TOLERANCE = 0.05


class Choice(NamedTuple):
    """The `method` of `attention.packed`, and why it is not the kernel of this platform, or ""."""

    method: str
    note: str = ""

    def describe(self, length: int) -> str:
        """For people: "blockwise; cudnn does not run here: ...", for rows of this length."""
        return "; ".join(filter(None, (attention.by_xla(self.method, length), self.note)))


def choose(asked: str, model: QwenConfig, dtype: Any, jit: Callable[..., Any]) -> Choice:
    """What `config.model.attention` means on this machine.

    Args:
      asked: its value: "auto" or a method.
      model: whose heads attend.
      dtype: of queries, keys and values.
      jit:   `jax.jit`, from the one module that compiles.

    Raises:
      InputError: if a kernel is asked for that does not run here.
    """
    backend = jax.default_backend()
    kernel = next((name for name, (needed, _) in KERNELS.items() if needed == backend), "") if asked == "auto" else asked
    if kernel not in KERNELS:
        return Choice(asked)
    needed, words = KERNELS[kernel]
    reason = f"it needs {words}, and this is {backend}" if needed != backend else ""
    reason = reason or failure(kernel, model.group, model.head_dim, jnp.dtype(dtype).name, jit)
    if not reason:
        return Choice(kernel)
    if asked == "auto":
        return Choice("auto", f"{kernel} does not run here: {reason}")
    raise InputError(f"config.model.attention={asked!r}: does not run here: {reason}; auto, full and blockwise do")


@functools.cache
def failure(method: str, group: int, head_dim: int, dtype: str, jit: Callable[..., Any]) -> str:
    """Why this kernel cannot be used, on one line, or "": it is run forward and backward, and compared with "full".

    Args:
      method:   of `attention.packed`.
      group:    G.
      head_dim: H.
      dtype:    of queries, keys and values.
      jit:      `jax.jit`.
    """
    draw, length = np.random.default_rng(0).normal, 200
    # Of numpy, since an array of JAX would belong to the mesh of the run where one is set.
    segments = np.array([[1] * 70 + [2] * 120 + [0] * 10, [0] * 30 + [1] * 170], np.int32)
    q, d_out = (draw(size=(2, length, 2, group, head_dim)).astype(jnp.dtype(dtype)) for _ in range(2))
    k, v = (draw(size=(2, length, 2, head_dim)).astype(jnp.dtype(dtype)) for _ in range(2))

    def passes(method: str) -> list[np.ndarray]:
        def both(q, k, v, segments, d_out):
            out, backward = jax.vjp(lambda q, k, v: attention.packed(q, k, v, segments, method=method), q, k, v)
            return out, *backward(d_out)

        return [np.asarray(x, np.float32) for x in jit(both)(q, k, v, segments, d_out)]

    # One device of this process, whatever mesh the run has.
    mesh = jax.make_mesh((1, 1, 1), AXES, devices=jax.local_devices()[:1], axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        expected = passes("full")
        try:
            results = passes(method)
        except Exception as error:  # a kernel fails in as many types as there are layers below it
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    for name, result, truth in zip(("the result", "dq", "dk", "dv"), results, expected, strict=True):
        wrong = np.abs(result - truth).max() / np.abs(truth).max()
        if not wrong < TOLERANCE:
            return f"{name} is wrong by {wrong:.2g} of the largest entry"
    return ""
