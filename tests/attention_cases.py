"""One attention case, run on every rank of a mesh and compared with a softmax written out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import meshcp
from meshcp.attention.distributed import CallPlan
from meshcp.mesh import context_mesh
from meshcp.placements import SequenceLayout
from tests.harness import make_mesh

MASKS = ("none", "key_bool", "key4_bool", "key_additive", "query_bool", "head_bool", "head_additive", "dead_rows")


@dataclass(frozen=True)
class Case:
    """A call of ``meshcp.attention``. ``mesh`` gives axis names and degrees in the user's order."""

    mesh: tuple[tuple[str, int], ...]
    heads: int = 4
    kv_heads: int | None = None
    queries: int = 12
    keys: int | None = None
    batch: int = 2
    width: int = 8
    value_width: int | None = None
    mask: str = "none"
    mask_is_sharded: bool = False
    causal: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float64
    kv_replicated: bool = False
    ulysses_on_heads: bool = False
    gather_kv: bool = False
    seed: int = 0

    @property
    def world(self) -> int:
        return math.prod(degree for _, degree in self.mesh)

    def __str__(self) -> str:
        mesh = "x".join(f"{name}{degree}" for name, degree in self.mesh)
        keys = self.queries if self.keys is None else self.keys
        text = f"{mesh}-h{self.heads}/{self.kv_heads or self.heads}-s{self.queries}/{keys}-{self.mask}"
        flags = ("causal", "mask_is_sharded", "kv_replicated", "ulysses_on_heads", "gather_kv")
        return text + "".join(f"-{flag}" for flag in flags if getattr(self, flag)) + f"-{str(self.dtype)[6:]}"


def make_mask(case: Case, generator: torch.Generator) -> Tensor | None:
    keys = case.queries if case.keys is None else case.keys
    B, H, S, K = case.batch, case.heads, case.queries, keys
    if case.mask == "none":
        return None
    if case.mask.startswith("key"):
        lengths = [max(1, K - 1 - 2 * b) for b in range(B)]
        keep = torch.arange(K)[None, :] < torch.tensor(lengths)[:, None]
        if case.mask == "key4_bool":
            return keep[:, None, None, :]
        if case.mask == "key_additive":
            return torch.zeros(B, K, dtype=case.dtype).masked_fill(~keep, -10000.0)
        return keep
    if case.mask == "query_bool":
        keep = torch.rand(B, 1, S, K, generator=generator) < 0.6
        keep[..., 0] = True
        return keep
    if case.mask == "dead_rows":
        keep = torch.rand(B, 1, S, K, generator=generator) < 0.5
        keep[:, :, ::3] = False
        return keep
    shape = (B, H, S, K)
    if case.mask == "head_bool":
        keep = torch.rand(shape, generator=generator) < 0.6
        keep[..., -1] = True
        return keep
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """The formula, in the dtype of its inputs. Rows that see no key give zeros, as SDPA does."""
    group = q.shape[1] // k.shape[1]
    k, v = (torch.stack([x[:, h // group] for h in range(q.shape[1])], 1) for x in (k, v))
    scores = torch.einsum("bhsd,bhkd->bhsk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        if mask.ndim == 2:
            mask = mask[:, None, None, :]
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
        )
    if causal:
        hidden = torch.arange(k.shape[2])[None, :] > torch.arange(q.shape[2])[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
    norm = weights.sum(-1, keepdim=True)
    return torch.einsum("bhsk,bhkd->bhsd", weights / norm.masked_fill(norm == 0, 1.0), v)


def inputs(case: Case) -> tuple[list[Tensor], Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    keys = case.queries if case.keys is None else case.keys
    kv_heads = case.kv_heads or case.heads
    widths = (case.width, case.width, case.value_width or case.width)
    sizes = ((case.heads, case.queries), (kv_heads, keys), (kv_heads, keys))
    tensors = [
        torch.randn(case.batch, rows, heads, width, generator=generator, dtype=torch.float64).transpose(1, 2)
        for (heads, rows), width in zip(sizes, widths, strict=True)
    ]
    grad = torch.randn(case.batch, case.heads, case.queries, widths[2], generator=generator, dtype=torch.float64)
    return [x.to(case.dtype) for x in tensors], make_mask(case, generator), grad.to(case.dtype)


def reference(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """[out, dq, dk, dv] by the formula in ``dtype``."""
    tensors, mask, grad = inputs(case)
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    out = softmax_attention(*leaves, mask, case.causal, case.scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def run_case(case: Case) -> list[Tensor]:
    """On every rank of the mesh: [out, dq, dk, dv] gathered."""
    mesh = make_mesh(case.mesh)
    tensors, mask, grad = inputs(case)
    on_axis: dict[str, Placement] = {
        "ring": Shard(2), "ulysses": Shard(1) if case.ulysses_on_heads else Shard(2), "tp": Shard(1), "dp": Shard(0),
    }  # fmt: skip
    placements = [on_axis.get(name, Replicate()) for name, _ in case.mesh]
    replicated = [Replicate() if name in ("ring", "ulysses") else on_axis[name] for name, _ in case.mesh]
    kv = replicated if case.kv_replicated else placements
    leaves = [
        distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(tensors, (placements, kv, kv), strict=True)
    ]
    if mask is not None and case.mask_is_sharded:
        dim = mask.ndim - 1
        mask = distribute_tensor(
            mask, mesh, [Shard(dim) if n in ("ring", "ulysses") else Replicate() for n, _ in case.mesh]
        )
    options: dict[str, Any] = {
        "causal": case.causal, "scale": case.scale, "enable_gqa": case.kv_heads is not None,
        "gather_kv": case.gather_kv,
    }  # fmt: skip
    out = meshcp.attention(*leaves, mask, **options)
    assert isinstance(out, DTensor)
    assert out.placements == tuple(placements)
    with torch.no_grad():
        silent = meshcp.attention(*leaves, mask, **options)
    assert torch.equal(silent.to_local(), out.detach().to_local()), "no_grad changes the result"
    grads = torch.autograd.grad(out, leaves, distribute_tensor(grad, mesh, placements))
    return [x.full_tensor() for x in (out.detach(), *grads)]


def run_cases(cases: list[Case]) -> list[list[Tensor]]:
    """:func:`run_case` for each, in one call of the workers."""
    return [run_case(case) for case in cases]


def single_process(case: Case) -> list[Tensor]:
    """[out, dq, dk, dv] of ``F.scaled_dot_product_attention`` on one process, in the dtype of the case."""
    tensors, mask, grad = inputs(case)
    leaves = [x.requires_grad_() for x in tensors]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, mask[:, None, None] if mask is not None and mask.ndim == 2 else mask, is_causal=case.causal,
        enable_gqa=case.kv_heads is not None,
    )  # fmt: skip
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def several_streams(axes: tuple[tuple[str, int], ...], gather_kv: bool) -> list[str]:
    """Sequences that are concatenations, whose shards do not follow each other: every mask; one line a difference."""
    names = [name for name, _ in axes]
    context = context_mesh(make_mesh(axes))
    outer = names[0] == "ulysses" and len(names) == 2
    wrong = []
    for (queries, keys), (heads, kv_heads) in itertools.product(
        [((3, 10), None), ((3, 10), (7, 1, 6))], [(5, 5), (6, 2)]
    ):
        q_layout = SequenceLayout(queries, context.ring, context.ulysses, outer)
        kv_layout = SequenceLayout(keys or queries, context.ring, context.ulysses, outer)
        plan = CallPlan(context, q_layout, kv_layout, heads, kv_heads, gather_kv)
        for mask, causal in [(mask, False) for mask in MASKS] + [("none", True)]:
            case = Case(
                axes, heads, kv_heads, sum(queries), sum(keys or queries), mask=mask, causal=causal, gather_kv=gather_kv
            )
            tensors, global_mask, grad = inputs(case)
            q_rows, kv_rows = (
                [i for low, high in layout.rows(context.ring_rank, context.ulysses_rank) for i in range(low, high)]
                for layout in (q_layout, kv_layout)
            )
            mine = q_rows, kv_rows, kv_rows
            leaves = [x[:, :, rows].requires_grad_() for x, rows in zip(tensors, mine, strict=True)]
            out = plan.run(*leaves, global_mask, causal=causal)
            actual = [out.detach(), *torch.autograd.grad(out, leaves, grad[:, :, q_rows])]
            expected = reference(case, torch.float64)
            for name, a, e, rows in zip(("out", "dq", "dk", "dv"), actual, expected, (q_rows, *mine), strict=True):
                difference = float((a - e[:, :, rows]).abs().max() / e.abs().max()) if rows else 0.0
                if not difference <= 1e-10:
                    wrong.append(f"{case} of {q_layout} over {kv_layout}: {name} differs by {difference:.1e}")
    return wrong
