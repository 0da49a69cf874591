"""Direct access to the flat fp32 partitions of DeepSpeed 0.19: no gather, no copy.

Which class holds them where:
    no ZeRO          torch's optimizer steps on each parameter, the same on every dp rank
    stages 1 and 2   a param group is flattened, padded at its end and cut evenly over dp: a fragment starts and stops anywhere
    stage 3          each parameter is padded to a multiple of dp and cut evenly; the padding is uninitialised memory
Masters are separate storage from the weights in every stage with ZeRO, in fp32 too. Not for offload, hpZ, quantised weights or
round_robin_gradients; deepspeed_config refuses those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron_lite.checkpoint.slices import OwnedSlice
from megatron_lite.parallel.shard_spec import spec_of
from megatron_lite.training.optimizers import adamw


@dataclass(frozen=True)
class Fragment:
    """Where the part of a parameter that this rank owns lies."""

    flat: torch.Tensor  # what torch's optimizer steps on
    offset: int  # first element in it
    start: int  # the range of the local parameter, row-major
    stop: int


class Partitions:
    """The partitions of one DeepSpeed engine on this rank. Use on a step boundary, on every rank."""

    def __init__(self, engine: Any, *, dp_rank: int, dp_size: int) -> None:
        self._module, self._optimizer = engine.module, engine.optimizer
        self._dp_rank, self._dp_size = dp_rank, dp_size
        kind = type(self._optimizer)
        assert kind in (DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer, DeepSpeedZeroOptimizer) or isinstance(
            self._optimizer, torch.optim.Optimizer
        ), f"unknown optimizer wrapper {kind.__name__}"
        self._stage3 = kind is DeepSpeedZeroOptimizer_Stage3
        self._zero = not isinstance(self._optimizer, torch.optim.Optimizer)
        adamw.ensure_state(self.torch_optimizer, self.flats())

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """Its state is keyed by the flats."""
        return self._optimizer.optimizer if self._zero else self._optimizer

    def flats(self) -> list[torch.Tensor]:
        """One a param group (stages 1, 2), a sub-group (3) or a parameter (no ZeRO)."""
        if self._stage3:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        if isinstance(self._optimizer, BF16_Optimizer):
            return list(self._optimizer.fp32_groups_flat_partition)
        if self._zero:
            return list(self._optimizer.single_partition_of_fp32_groups)
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _fragment(self, parameter: Any) -> Fragment | None:
        if self._stage3:
            group, offset, size = self._optimizer.grad_position[parameter.ds_id]
            start = size * dist.get_rank(parameter.ds_process_group)
            stop = min(start + size, parameter.ds_numel)
            # the last ranks may hold padding only
            return Fragment(self._optimizer.fp32_partitioned_groups_flat[group], offset, start, stop) if start < stop else None
        if self._zero:
            mapping = parameter._hp_mapping
            if mapping is None:
                return None
            flat = self.flats()[mapping.param_group_index]
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            assert mapping.hp_fragment.data_ptr() == flat.data_ptr() + here.start * flat.element_size()
            return Fragment(flat, here.start, there.start, there.start + there.numel)
        return Fragment(parameter, 0, 0, parameter.numel())

    def fragments(self) -> Iterator[tuple[str, torch.nn.Parameter, Fragment]]:
        """(name, parameter, what this rank owns of it); a tied weight once, under its first name."""
        for name, parameter in self._module.named_parameters():
            fragment = self._fragment(parameter)
            if fragment is not None:
                yield name, parameter, fragment

    def slices(self) -> list[OwnedSlice]:
        """Master and moments of every fragment. Without ZeRO all dp ranks hold, and need, everything: each writes a share."""
        found = []
        for name, parameter, part in self.fragments():
            first, last = part.start, part.stop
            if not self._zero:
                first, last = last * self._dp_rank // self._dp_size, last * (self._dp_rank + 1) // self._dp_size
            state = self.torch_optimizer.state[part.flat]
            for kind, tensor in (("master", part.flat), *((moment, state[moment]) for moment in adamw.STATES)):
                view = tensor.detach().view(-1)[part.offset : part.offset + part.stop - part.start]
                found.append(OwnedSlice(name, spec_of(parameter), kind, part.start, part.stop, view, first, last))
        return found

    @torch.no_grad()
    def refresh(self) -> None:
        """Push the masters to the weights that forward uses. Collective over dp."""
        optimizer = self._optimizer
        if self._stage3:
            optimizer._partition_all_parameters()  # drops gathered copies, the persistent small parameters' too
            for group in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            optimizer.checkpoint_event_epilogue()  # gathers the persistent parameters again
        elif self._zero:
            optimizer.update_lp_params()
