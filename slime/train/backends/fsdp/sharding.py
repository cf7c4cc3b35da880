"""Shards a module over the ranks with FSDP2, and converts between whole tensors and this rank's parts.

Invariant: one rank runs the same code as many, so the numbers do not depend on how many there are; gradients are summed
over ranks, never averaged.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from slime.errors import UserError
from slime.models.families.tp_sharding import Region, whole_region
from slime.models.tensor_sources import read_to_device
from slime.train.backends.frozen import ShardedModel
from slime.train.backends.fsdp.fused.layer import FusedLayer
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.timers import RankProgress

COMPILE_MIN_PARAMETERS = 100_000_000  # for smaller models, half a minute of compiling costs more than it saves


def shard(
    packed: PackedModel,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    progress: RankProgress,
    *,
    on_host: bool = False,
) -> None:
    """Shard with one group per decoder layer and the rest (embedding, last norm, head) at the root.

    A layer's gathered weights are freed after its forward, or only after the backward if one rank has all weights
    anyway and most are trained: mostly frozen weights would take most of the memory, and gathering them again is cheap
    in comparison. Frozen weights of which every rank has a whole copy stay plain tensors, since gathering would
    duplicate them. Of tensors on the meta device this rank's part is read from the model's sources. `on_host`: the
    shards and their gradients are in the host's memory.
    """
    where = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if on_host else OffloadPolicy()
    layer_names = set(packed.model._no_split_modules or ())
    num_parameters = sum(parameter.numel() for parameter in packed.parameters())
    trained = sum(parameter.numel() for parameter in packed.parameters() if parameter.requires_grad)
    keep = stays_gathered(packed, mesh, on_host=on_host)
    is_cut = trained > 0 or replica_size(mesh) > 1 or on_host
    adapted = 0 < 2 * trained < num_parameters  # with an adapter at every matrix, compiling takes minutes
    worth_compiling = mesh.device_type == "cuda" and num_parameters >= COMPILE_MIN_PARAMETERS and not adapted
    for module in list(packed.modules()):
        is_fused = isinstance(module, FusedLayer)
        if is_fused or type(module).__name__ in layer_names:
            if worth_compiling and not is_fused:
                # fuses norms, rotary embedding and gating; all layers share the compiled code
                module.compile(dynamic=True)
            if is_cut:
                fully_shard(
                    module, mesh=mesh, mp_policy=precision, offload_policy=where, reshard_after_forward=not keep
                )
    if is_cut:
        fully_shard(packed, mesh=mesh, mp_policy=precision, offload_policy=where, reshard_after_forward=False)
    else:
        device = _device_of(mesh)
        for tensor in (*packed.parameters(), *packed.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    experts = (parameter for name, parameter in packed.named_parameters() if re.search(r"\bexperts\.\d+\.", name))
    if mesh.size() > 1 and any(parameter.requires_grad for parameter in experts):
        # a rank without tokens for an expert module has no gradient of it, and would add the next parameter's to it
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UserError(
                f"{type(packed.model).__name__} has a module for each expert, which torch {torch.__version__} cannot "
                "train on several processes: install torch 2.13, or train on one"
            )
        assert isinstance(packed, FSDPModule)
        packed.set_reduce_scatter_unused_params(True)
    _load_local_weights(packed, torch.device("cpu") if on_host else _device_of(mesh), progress)
    packed.placed = dict(packed.model.named_parameters())


def stays_gathered(packed: PackedModel, mesh: DeviceMesh, *, on_host: bool) -> bool:
    """Return True if one rank has all weights, on the device, and most are trained: they stay gathered for backward."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in packed.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return replica_size(mesh) == 1 and 2 * trained > sum(size for size, _ in sizes) and not on_host


def _device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device in the mesh."""
    on_gpu = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(mesh.device_type)


@torch.no_grad()
def _load_local_weights(packed: PackedModel, device: torch.device, progress: RankProgress) -> None:
    """Read this rank's parts of the parameters on the meta device; keeps ties, and releases the sources."""
    owners: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    for module in packed.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, key))
    unread = {name: tensor for name, tensor in packed.model.named_parameters() if local_part(tensor).is_meta}
    for name, parameter in progress.over(unread.items(), "reading weights: tensor", len(unread)):
        part = read_to_device(packed.sources[name], local_region(parameter), device).to(parameter.dtype)
        # unlike `DTensor.from_local`, `empty_like` also works on another device than the mesh's
        placed = torch.empty_like(parameter, device=device)
        local_part(placed).copy_(part)
        filled = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        for module, key in owners[parameter]:
            module.load_state_dict({key: filled}, strict=False, assign=True)
    packed.sources.clear()


def local_region(parameter: torch.Tensor) -> Region:
    """Region of the whole tensor that this rank has."""
    region = list(whole_region(parameter.shape))
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                cut = region[placement.dim]
                count, index = parameter.device_mesh.size(dimension), parameter.device_mesh.get_local_rank(dimension)
                size = -(-(cut.stop - cut.start) // count)
                begin = min(cut.start + index * size, cut.stop)
                region[placement.dim] = slice(begin, min(begin + size, cut.stop))
    return tuple(region)


def replica_size(mesh: DeviceMesh) -> int:
    """Number of ranks that share one copy of the model."""
    return mesh.size(mesh.ndim - 1)


def set_gradient_sync(
    packed: PackedModel, mesh: DeviceMesh, *, last: bool, keeps: bool = False, on_host: bool = False
) -> None:
    """Set if the next backward reduces its gradients; `last`: the step's last one, after which they are whole sums.

    Ranks that share a copy reduce every time, so that none ever holds a whole model's gradients. Copies add theirs up
    once, so a rank with a whole copy reduces only then, unless its gradients are on the host. Weights that a rank
    `keeps` whole until the backward are also kept for the next forward.
    """
    assert isinstance(packed, FSDPModule)
    packed.set_requires_gradient_sync(last or replica_size(mesh) > 1 or on_host)
    packed.set_reshard_after_backward(last or not keeps)
    packed.set_requires_all_reduce(last)


def gather_ahead(packed: PackedModel) -> None:
    """Prefetch whole weights in the compute dtype for the next forward, while the device computes something else.

    Otherwise the first forward of a step would gather them layer by layer, and the device would wait for the host.
    """
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def reshard(packed: PackedModel) -> None:
    """Free gathered copies, which a forward without a backward leaves behind.

    They take memory and would be used instead of new weights.
    """
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sharded_model(packed: PackedModel) -> ShardedModel[PackedModel]:
    """A model that `shard` sharded, with access to this rank's parts of its parameters."""

    def parts() -> dict[str, torch.Tensor]:
        reshard(packed)
        return {name: local_part(parameter.detach()) for name, parameter in packed.placed.items()}

    return ShardedModel(packed, parts)


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor on the device; a collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor
    at_home = tensor.device.type == tensor.device_mesh.device_type
    return tensor.full_tensor() if at_home else gather_like(tensor, part_on_device(tensor))


def part_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part on the mesh's device, where ranks can send it, also of a tensor on the host."""
    part = local_part(tensor)
    return part.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else part


def total_norm(gradients: list[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Global norm of sharded gradients on the host; the ranks of a copy add their squares up on the device."""
    own = nn.utils.get_total_norm([local_part(gradient) for gradient in gradients])
    squared = own.to(mesh.device_type).square()
    if replica_size(mesh) > 1:
        dist.all_reduce(squared, group=mesh.get_group(mesh.ndim - 1))
    return squared.sqrt()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that is sharded as `parameter` is, from this rank's part; a collective for a sharded one."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return part
    return gather_full_tensor(placed_like(parameter, part))


def placed_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Wrap this rank's part of a tensor that is sharded as `parameter` is into that sharded tensor."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
