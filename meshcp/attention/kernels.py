"""Local attention kernels that return (out, lse), and their backward, for one block of keys.

Shapes: B batch, H heads, S query rows, K key rows, D head width. :func:`block_forward` and :func:`block_backward`
take ``[B, H, S, D]`` tensors of any strides and widths, and give rows that see no key out = 0, lse = -inf. What the
kernels themselves want (as many KV heads as query heads, widths of a certain multiple, elements of a row side by side)
and say is made even here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import _compat
from ..errors import AttentionError
from .masks import additive


class Gradients(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


Forward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool, float], tuple[torch.Tensor, torch.Tensor]
]
Backward = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
        bool,
        float,
    ],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
]


@dataclass(frozen=True)
class KernelCall:
    """What the choice of a kernel depends on.

    Attributes:
        device: device type of the tensors.
        dtype: of q; None where it is not known yet.
        mask: whether there is a mask.
        width: head width; 0 where it is not known yet.
        widths: whether values are of another width than keys.
        capability: compute capability of a CUDA device; None for other devices, and where it is not known.
    """

    device: str
    dtype: torch.dtype | None = None
    mask: bool = False
    width: int = 0
    widths: bool = False
    capability: tuple[int, int] | None = None

    @staticmethod
    def of(q_BHSD: torch.Tensor, v_BHSE: torch.Tensor, mask: bool) -> KernelCall:
        width, values = q_BHSD.shape[-1], v_BHSE.shape[-1]
        capability = torch.cuda.get_device_capability(q_BHSD.device) if q_BHSD.device.type == "cuda" else None
        return KernelCall(q_BHSD.device.type, q_BHSD.dtype, mask, width, values != width, capability)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Kernel:
    """A local attention with its log-sum-exp.

    Attributes:
        name: the name by which users and plans ask for it: a Diffusers backend name.
        forward: ``(q, k, v, additive mask or None, causal, scale) -> (out [B,H,S,D], lse [B,H,S])``.
        backward: ``(grad, q, k, v, out, lse, additive mask or None, causal, scale) -> (dq, dk, dv)``, given out and
            lse over ALL keys, so that the contribution of this block alone is exact.
        devices: device types on which it runs; empty means all.
        dtypes: dtypes that it takes; empty means all.
        masks: whether it takes a mask.
        widths: whether values may be of another width than keys.
        compute: the dtype that half precision is computed in, None for its own. A kernel that returns half precision
            rounds the output of every block, which over a ring adds up to more than one process's single rounding; on
            the CPU, where results are proved, each block is computed in fp32. CUDA's kernels leave no such choice.
        ampere: dtypes for which a CUDA device needs compute capability 8.0.
        multiple: what the head width must be a multiple of; others are filled up with zeros.
        widest: the largest head width, 0 for none.
    """

    name: str
    forward: Forward
    backward: Backward
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    masks: bool = True
    widths: bool = False
    compute: torch.dtype | None = None
    ampere: tuple[torch.dtype, ...] = ()
    multiple: int = 1
    widest: int = 0

    def fit(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        """``x`` in the dtype in which this kernel computes, filled up to a width that it takes, rows dense."""
        x = x_BHSD if self.compute is None or x_BHSD.dtype == torch.float64 else x_BHSD.to(self.compute)
        missing = -x.shape[-1] % self.multiple
        if missing:
            return F.pad(x, (0, missing))
        # Kernels go by the strides of all dimensions but this one, and only some of them notice.
        return x if x.stride(-1) == 1 else x.contiguous()

    def misfit(self, call: KernelCall) -> str | None:
        """Why this kernel cannot run such a call, or None when it can."""
        if self.devices and call.device not in self.devices:
            return f"it runs on {' or '.join(self.devices)}, not on {call.device}"
        if self.dtypes and call.dtype is not None and call.dtype not in self.dtypes:
            return f"it takes {', '.join(map(_name, self.dtypes))}, not {_name(call.dtype)}"
        if call.dtype in self.ampere and call.capability is not None and call.capability < (8, 0):
            found = ".".join(map(str, call.capability))
            return f"in {_name(call.dtype)} it needs a device of compute capability 8.0 or newer, found {found}"
        if call.mask and not self.masks:
            return "it takes no attention mask"
        if call.widths and not self.widths:
            return "it takes no values of another width than the keys"
        if self.widest and call.width > self.widest:
            return f"it takes head widths up to {self.widest}, not {call.width}"
        return None


def _math_scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(dtype) @ k.to(dtype).mT) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _math_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _math_scores(q, k, mask, causal, scale)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - finite_lse(lse)[..., None])
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def _math_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = torch.exp(_math_scores(q, k, mask, causal, scale) - lse[..., None])
    grad, out = grad.to(weights.dtype), out.to(weights.dtype)
    delta = (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ v.to(weights.dtype).mT - delta) * scale
    return grad_scores @ k.to(weights.dtype), grad_scores.mT @ q.to(weights.dtype), weights.mT @ grad


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _compat.fused_attention("flash_attention_for_cpu")(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _cpu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = _compat.fused_attention("flash_attention_for_cpu_backward")(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


def _no_dropout_state(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The CUDA kernels take the state of the dropout generator; with dropout 0 they never read it.
    return torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, dtype=torch.uint64, device=q.device)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    result = _compat.fused_attention("flash_attention")(q, k, v, 0.0, causal, False, scale=scale)
    return result[0], result[1]


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed, offset = _no_dropout_state(q)
    queries, keys = q.shape[2], k.shape[2]
    dq, dk, dv = _compat.fused_attention("flash_attention_backward")(
        grad, q, k, v, out, lse, None, None, queries, keys, 0.0, causal, seed, offset, scale=scale
    )
    return dq, dk, dv


def _aligned_bias(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    # The memory-efficient kernel wants the shape of the scores, and rows that start at 16-byte boundaries. Strides of 0
    # are right: a mask of keys takes no more memory than it has keys.
    if mask is None:
        return None
    keys = k.shape[2]
    storage = mask.new_zeros(*mask.shape[:3], -(-keys // 16) * 16)
    storage[..., :keys] = mask
    return storage.expand(*q.shape[:3], -1)[..., :keys]


def _efficient_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    bias = _aligned_bias(mask, q, k)
    result = _compat.fused_attention("efficient_attention")(q, k, v, bias, True, 0.0, causal, scale=scale)
    return result[0], result[1][..., : q.shape[2]]


def _efficient_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    # The forward kernel fills its lse up to a multiple of 32 rows, and the backward kernel reads that far; AMD's does
    # neither.
    if torch.version.hip is None and lse.shape[-1] % 32:
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    bias = _aligned_bias(mask, q, k)
    # It takes the strides of out over batch and heads, but assumes the one over rows.
    out = rows_outermost(out)
    dq, dk, dv, _ = _compat.fused_attention("efficient_attention_backward")(
        grad, q, k, v, bias, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


def _cudnn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # Diffusers found wrong results where the inputs of this operator were not contiguous.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    result = _compat.fused_attention("cudnn_attention")(q, k, v, mask, True, 0.0, causal, False, scale=scale)
    return result[0], result[1].squeeze(-1)


def _cudnn_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed, offset = _no_dropout_state(q)
    grad, q, k, v, out = (x.contiguous() for x in (grad, q, k, v, out))
    dq, dk, dv = _compat.fused_attention("cudnn_attention_backward")(
        grad, q, k, v, out, lse[..., None], seed, offset, mask, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv


_HALF = (torch.bfloat16, torch.float16)
_CPU_FLASH = Kernel("cpu_flash", _cpu_forward, _cpu_backward, devices=("cpu",), compute=torch.float32)
_FLASH = Kernel(
    "_native_flash", _flash_forward, _flash_backward,
    devices=("cuda",), dtypes=_HALF, masks=False, ampere=_HALF, multiple=8, widest=256,
)  # fmt: skip
_EFFICIENT = Kernel(
    "_native_efficient", _efficient_forward, _efficient_backward,
    devices=("cuda",), dtypes=(*_HALF, torch.float32), ampere=(torch.bfloat16,), multiple=8,
)  # fmt: skip
_CUDNN = Kernel(
    "_native_cudnn", _cudnn_forward, _cudnn_backward,
    devices=("cuda",), dtypes=_HALF, ampere=_HALF, multiple=8, widest=256,
)  # fmt: skip
_MATH = Kernel("_native_math", _math_forward, _math_backward, widths=True)

KERNELS = {kernel.name: kernel for kernel in (_CPU_FLASH, _FLASH, _EFFICIENT, _CUDNN, _MATH)}
AUTOMATIC = ("", "native")
WITH_LSE = ("native", "_native_flash", "_native_efficient", "_native_cudnn", "_native_math")


def choose_kernel(name: str, call: KernelCall) -> Kernel:
    """The kernel of this name, or the fastest that fits when the name leaves it open (``""`` or ``"native"``).

    Raises:
        AttentionError: a backend that gives no log-sum-exp, or one that cannot take this call.
    """
    if name in AUTOMATIC:
        for kernel in (_CPU_FLASH, _FLASH, _EFFICIENT):
            if kernel.misfit(call) is None:
                return kernel
        return _MATH
    if name not in KERNELS:
        raise AttentionError(
            f"attention backend {name!r} gives no log-sum-exp that meshcp can merge, which ring > 1 needs; "
            f"use one of {', '.join(WITH_LSE)} (model.set_attention_backend), or a backend of your choice with "
            "gather_kv=True or all ranks on the ulysses axis"
        )
    kernel = KERNELS[name]
    if (reason := kernel.misfit(call)) is not None:
        raise AttentionError(
            f"attention backend {name!r} cannot take this call: {reason}; set the backend 'native', which chooses one "
            "that fits"
        )
    return kernel


def unrounded_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype to compute in where every rank makes a part of a gradient and the parts are summed.

    As with the blocks of a ring (:attr:`Kernel.compute`), rounding each part to half precision would add up to more
    than one process's single rounding; the CPU, where results are proved, computes in fp32.
    """
    compute = _CPU_FLASH.compute
    half = x.dtype in _HALF and x.device.type in _CPU_FLASH.devices
    return compute if half and compute is not None else x.dtype


def finite_lse(lse: torch.Tensor) -> torch.Tensor:
    """``lse`` with 0 in place of -inf: exp(-inf - 0) is 0 where exp(-inf - -inf) would be NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def rows_outermost(x_BHSD: torch.Tensor) -> torch.Tensor:
    """The same values in contiguous ``[B, S, H, D]`` memory."""
    return x_BHSD.transpose(1, 2).contiguous().transpose(1, 2)


def _bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None:
        return None
    bias = additive(mask, dtype)
    # As with q, k and v: kernels do not look at the stride of the last dimension.
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def _group_heads(x_BHSD: torch.Tensor, heads: int) -> torch.Tensor:
    """KV heads repeated to ``heads`` (a view where they already are as many)."""
    return x_BHSD if x_BHSD.shape[1] == heads else x_BHSD.repeat_interleave(heads // x_BHSD.shape[1], 1)


def block_forward(
    kernel: Kernel,
    q_BHSD: torch.Tensor,
    k_BHKD: torch.Tensor,
    v_BHKD: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one block of keys, none of its sizes zero; ``mask`` boolean or additive, KV heads may be fewer."""
    heads = q_BHSD.shape[1]
    q, k, v = (kernel.fit(x) for x in (q_BHSD, k_BHKD, v_BHKD))
    bias = _bias(mask, q.dtype)
    out, lse = kernel.forward(q, _group_heads(k, heads), _group_heads(v, heads), bias, causal, scale)
    out = out[..., : v_BHKD.shape[-1]]
    if bias is not None:
        # Kernels disagree on rows that see no key: CPU flash reports lse = 0, others NaN.
        dead = (bias == float("-inf")).all(-1)
        lse = lse.masked_fill(dead, float("-inf"))
        out = out.masked_fill(dead[..., None], 0.0)
    return out, lse


def block_backward(
    kernel: Kernel,
    grad_BHSD: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BHKD: torch.Tensor,
    v_BHKD: torch.Tensor,
    out_BHSD: torch.Tensor,
    lse_BHS: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> Gradients:
    """Gradients of one block of keys, given ``out`` and ``lse`` over all keys (lse finite: see ``finite_lse``)."""
    heads, kv_heads = q_BHSD.shape[1], k_BHKD.shape[1]
    grad, q, k, v, out = (kernel.fit(x) for x in (grad_BHSD, q_BHSD, k_BHKD, v_BHKD, out_BHSD))
    bias = _bias(mask, q.dtype)
    dq, dk, dv = kernel.backward(
        grad, q, _group_heads(k, heads), _group_heads(v, heads), out, lse_BHS.contiguous(), bias, causal, scale
    )
    dq, dk, dv = dq[..., : q_BHSD.shape[-1]], dk[..., : k_BHKD.shape[-1]], dv[..., : v_BHKD.shape[-1]]
    if kv_heads != heads:
        dk, dv = (x.unflatten(1, (kv_heads, heads // kv_heads)).sum(2) for x in (dk, dv))
    return Gradients(dq, dk, dv)
