"""A module cut over the ranks, and the parts of a tensor that follow from it.

Invariant: one rank runs the same code as many, so the numbers do not depend on how many there are; gradients are summed
over ranks, never averaged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from slime.errors import UserError
from slime.models.families.tp_sharding import Region, whole_region
from slime.models.tensor_sources import read_onto
from slime.train.backends.fsdp.fused.layer import FusedLayer
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.timers import Progress

COMPILE_MIN_PARAMETERS = 100_000_000  # below, half a minute of compiling costs more than it saves


def shard(
    packed: PackedModel, mesh: DeviceMesh, precision: MixedPrecisionPolicy, progress: Progress, *, on_host: bool = False
) -> None:
    """One group per decoder layer, the rest (embedding, last norm, head) at the root; shards go to the device.

    A layer's whole weights are given back after its forward, unless a backward follows and one rank has them anyway;
    where most are frozen they would be most of the memory, and copying them once more is nothing beside it.
    Frozen weights that a rank has for itself stay plain tensors: a gathered copy would be them once more.
    What is on the meta device is read, this rank's part of it. `on_host`: the shards and their gradients lie in the
    host's memory.
    """
    where = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if on_host else OffloadPolicy()
    layer_names = set(packed.model._no_split_modules or ())
    num_parameters = sum(parameter.numel() for parameter in packed.parameters())
    trained = sum(parameter.numel() for parameter in packed.parameters() if parameter.requires_grad)
    keep = keeps_whole(packed, mesh, on_host=on_host)
    is_cut = trained > 0 or copy_size(mesh) > 1 or on_host
    adapted = 0 < 2 * trained < num_parameters  # with an adapter at every matrix, compiling took minutes
    worth_compiling = mesh.device_type == "cuda" and num_parameters >= COMPILE_MIN_PARAMETERS and not adapted
    for module in list(packed.modules()):
        is_fused = isinstance(module, FusedLayer)
        if is_fused or type(module).__name__ in layer_names:
            if (
                worth_compiling and not is_fused
            ):  # fuses norms, rotary embedding and gating; all layers share the compiled code
                module.compile(dynamic=True)
            if is_cut:
                fully_shard(
                    module, mesh=mesh, mp_policy=precision, offload_policy=where, reshard_after_forward=not keep
                )
    if is_cut:
        fully_shard(packed, mesh=mesh, mp_policy=precision, offload_policy=where, reshard_after_forward=False)
    else:
        _move(packed, _device_of(mesh))
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if mesh.size() > 1 and any(parameter.requires_grad for parameter in _single_experts(packed)):
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UserError(
                f"{type(packed.model).__name__} has a module for each expert, which torch {torch.__version__} cannot "
                "train on several processes: install torch 2.13, or train on one"
            )
        assert isinstance(packed, FSDPModule)
        packed.set_reduce_scatter_unused_params(True)
    _read_parts(packed, torch.device("cpu") if on_host else _device_of(mesh), progress)


def keeps_whole(packed: PackedModel, mesh: DeviceMesh, *, on_host: bool) -> bool:
    """Whether a rank has all weights for itself, and most of them are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in packed.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return copy_size(mesh) == 1 and 2 * trained > sum(size for size, _ in sizes) and not on_host


def _single_experts(packed: PackedModel) -> Iterator[torch.Tensor]:
    """Parameters of experts that are modules of their own.

    A rank none of whose tokens went to one has no gradient of it, and would add that of the next parameter to it.
    """
    return (parameter for name, parameter in packed.named_parameters() if re.search(r"\bexperts\.\d+\.", name))


def _device_of(mesh: DeviceMesh) -> torch.device:
    on_gpu = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(mesh.device_type)


def _move(module: nn.Module, device: torch.device) -> None:
    """What is not to be read, to the device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


@torch.no_grad()
def _read_parts(packed: PackedModel, device: torch.device, progress: Progress) -> None:
    """A tied parameter stays one; the sources are let go of."""
    owners: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    for module in packed.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, key))
    unread = {name: tensor for name, tensor in packed.model.named_parameters() if local_part(tensor).is_meta}
    for name, parameter in progress.over(unread.items(), "reading weights: tensor", len(unread)):
        part = read_onto(packed.sources[name], local_region(parameter), device).to(parameter.dtype)
        placed = torch.empty_like(
            parameter, device=device
        )  # unlike `DTensor.from_local`, also beside the mesh's device
        local_part(placed).copy_(part)
        filled = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        for module, key in owners[parameter]:
            module.load_state_dict({key: filled}, strict=False, assign=True)
    packed.sources.clear()


def local_region(parameter: torch.Tensor) -> Region:
    """Which part of the whole this rank has."""
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


def copy_size(mesh: DeviceMesh) -> int:
    """How many ranks share one copy of the model."""
    return mesh.size(mesh.ndim - 1)


def reduce_gradients(
    packed: PackedModel, mesh: DeviceMesh, *, last: bool, keeps: bool = False, on_host: bool = False
) -> None:
    """Whether the coming backward reduces its gradients; `last`: the step's last one, after which they are whole sums.

    Ranks that share a copy do it every time, so that none ever holds a whole model's gradients; copies add theirs up
    once, and a rank that has a copy for itself has nothing to give away before that, unless to the host. Weights that a
    rank `keeps` whole until the backward are kept for the next forward too.
    """
    assert isinstance(packed, FSDPModule)
    packed.set_requires_gradient_sync(last or copy_size(mesh) > 1 or on_host)
    packed.set_reshard_after_backward(last or not keeps)
    packed.set_requires_all_reduce(last)


def gather_ahead(packed: PackedModel) -> None:
    """Whole weights in the compute dtype for the next forward, made while the device still computes something else.

    The first forward of a step would ask for them a layer at a time, and keep the device waiting for the host.
    """
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def reshard(packed: PackedModel) -> None:
    """A forward without a backward leaves gathered copies behind, which take memory and would outlive new weights."""
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_like(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of `full`, placed as `parameter` is."""
    placed = full.to(device=parameter.device, dtype=parameter.dtype)
    if not isinstance(parameter, DTensor):
        return placed
    return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, on the device; a collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor
    at_home = tensor.device.type == tensor.device_mesh.device_type
    return tensor.full_tensor() if at_home else gather_like(tensor, part_on_device(tensor))


def part_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part where ranks can send it, also of a tensor that lies on the host."""
    part = local_part(tensor)
    return part.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else part


def total_norm(gradients: list[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """The norm of sharded gradients that lie on the host; the ranks of a copy add theirs up on the device."""
    own = nn.utils.get_total_norm([local_part(gradient) for gradient in gradients])
    squared = own.to(mesh.device_type).square()
    if copy_size(mesh) > 1:
        dist.all_reduce(squared, group=mesh.get_group(mesh.ndim - 1))
    return squared.sqrt()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that lies on the ranks as `parameter` does; a collective for a sharded one."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return part
    return whole(placed_like(parameter, part))


def placed_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that lies on the ranks as `parameter` does, as that tensor."""
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
