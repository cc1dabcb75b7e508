"""The one way in which two partial attentions over disjoint keys become one.

Shapes: B batch, H heads, S query rows, D value width.
"""

from __future__ import annotations

import torch


class Merger:
    """Accumulates ``(out, lse)`` of attention over disjoint blocks of keys, in fp32 (fp64 for fp64 inputs).

    With ``w = sigmoid(lse_new - lse)``, ``out <- out + w (out_new - out)`` and
    ``lse <- log(exp(lse) + exp(lse_new))`` (Liu et al. 2023, "Ring Attention with Blockwise Transformers"; the
    sigmoid form never overflows). Rows that no block has reached yet have ``lse = -inf`` and ``out = 0``.
    """

    def __init__(self) -> None:
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, out_BHSD: torch.Tensor, lse_BHS: torch.Tensor) -> None:
        """Merge one more block. ``lse`` is fp32 (or fp64); a row without any allowed key has ``lse = -inf``."""
        dtype = lse_BHS.dtype
        if self._out is None or self._lse is None:
            self._out, self._lse = out_BHSD.to(dtype), lse_BHS
            return
        weight = torch.sigmoid(lse_BHS - self._lse).nan_to_num_(0.0)
        self._out = torch.lerp(self._out, out_BHSD.to(dtype), weight.unsqueeze(-1))
        self._lse = torch.logaddexp(self._lse, lse_BHS)

    def result(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``(out, lse)`` in the accumulation dtype, or None when nothing was added."""
        if self._out is None or self._lse is None:
            return None
        return self._out, self._lse
