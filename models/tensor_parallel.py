"""Tensor parallel plans: which modules of a model are cut over ``tp``, by class.

What a plan does not name stays whole on every rank (modulations, embeddings, the final layers).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from ..errors import PlanError
from ..plan import Plan
from ..tensor_parallel import ORDER, ShardHeads, ShardHidden, ShardParallelBlock

# Text beside image in one attention; a module lacks what its configuration leaves out.
_JOINT = ShardHeads(
    columns=("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"),
    rows=("to_out.0", "to_add_out"),
    norms=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
)

_ACROSS_HEADS = ShardHeads(
    columns=("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj"),
    rows=("to_out.0",),
    wide_norms=("norm_q", "norm_k", "norm_added_k"),
)

TENSOR_PARALLEL: dict[str, Plan] = {
    "FluxTransformer2DModel": Plan(
        {
            "transformer_blocks.*.attn": _JOINT,
            "transformer_blocks.*.ff": ShardHidden(),
            "transformer_blocks.*.ff_context": ShardHidden(),
            "single_transformer_blocks.*": ShardParallelBlock("attn", _JOINT, column="proj_mlp", row="proj_out"),
        }
    ),
    "QwenImageTransformer2DModel": Plan(
        {
            "transformer_blocks.*.attn": _JOINT,
            "transformer_blocks.*.img_mlp": ShardHidden(),
            "transformer_blocks.*.txt_mlp": ShardHidden(),
        }
    ),
    "SD3Transformer2DModel": Plan(
        {
            "transformer_blocks.*.attn": _JOINT,
            "transformer_blocks.*.attn2": _JOINT,
            "transformer_blocks.*.ff": ShardHidden(),
            "transformer_blocks.*.ff_context": ShardHidden(),
        },
        # The last block has no text after it, and only SD3.5 has a second attention.
        optional=("transformer_blocks.*.attn2", "transformer_blocks.*.ff_context"),
    ),
    "WanTransformer3DModel": Plan(
        {"blocks.*.attn1": _ACROSS_HEADS, "blocks.*.attn2": _ACROSS_HEADS, "blocks.*.ffn": ShardHidden()}
    ),
}
"""Class name -> plan."""


def tp_plan(model: nn.Module, mesh: DeviceMesh | None = None, axis: str = "tp") -> dict[str, ParallelStyle]:
    """The tensor parallel plan of a model, for ``parallelize_module``. Before :func:`meshcp.parallelize`::

        parallelize_module(model, mesh["tp"], meshcp.tp_plan(model, mesh))
        meshcp.parallelize(model, mesh)

    Args:
        mesh: the mesh; the plan is empty if it has no axis of this name or one of degree 1. None: the whole plan.
        axis: name of the tensor-parallel axis.

    Raises:
        PlanError: no plan for the class, or a model on which another parallelism stands already (with the right order).
    """
    name = type(model).__name__
    if isinstance(model, DistributedDataParallel) or any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError(f"{name} is sharded or replicated by FSDP or DDP already; the order is {ORDER}")
    if "_meshcp" in model.__dict__:
        raise PlanError(f"{name} is context-parallel already (handle.remove() undoes that); the order is {ORDER}")
    plan = next((TENSOR_PARALLEL[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in TENSOR_PARALLEL), None)
    if plan is None:
        raise PlanError(
            f"meshcp has no tensor parallel plan for {name}; there are plans for {', '.join(sorted(TENSOR_PARALLEL))}. "
            "Write one of meshcp.tensor_parallel.ShardHeads and ShardHidden, or of torch's own styles"
        )
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if axis not in names or mesh.size(names.index(axis)) == 1:
            return {}
    paths = {id(module): path for path, module in model.named_modules()}
    return {paths[id(module)]: style for _, module, style in plan.match(model)}
