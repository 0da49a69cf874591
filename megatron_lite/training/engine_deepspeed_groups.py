"""Our process groups in the form that DeepSpeed asks for (Megatron's `mpu`)."""

from __future__ import annotations

import torch.distributed as dist

from megatron_lite.parallel.groups import Axis, ProcessGroups, new_group


class ModelParallelUnit:
    """What `deepspeed.initialize(mpu=)` calls. A group of one rank is a real group here: DeepSpeed takes None for the world."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._axes = {"data": groups.dp, "model": groups.model, "tensor": groups.tp, "pipe": groups.pp}
        alone = None
        if any(axis.group is None for axis in self._axes.values()):  # known to its one member only: nobody else takes part
            alone = new_group([groups.rank], use_local_synchronization=True)
        self._groups = {name: axis.group or alone for name, axis in self._axes.items()}
        self._alone = alone

    def close(self) -> None:
        """Give back the group that was made here."""
        if self._alone is not None:
            dist.destroy_process_group(self._alone)
            self._alone = None

    def _axis(self, name: str) -> Axis:
        return self._axes[name]

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._groups["data"]

    def get_data_parallel_group_ranks(self) -> list[int]:
        axis = self._axis("data")
        return list(axis.ranks) if axis.size > 1 else [dist.get_rank()]

    def get_data_parallel_world_size(self) -> int:
        return self._axis("data").size

    def get_data_parallel_rank(self) -> int:
        return self._axis("data").rank

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Spans pp x tp: the norm is summed over it."""
        return self._groups["model"]

    def get_model_parallel_world_size(self) -> int:
        return self._axis("model").size

    def get_model_parallel_rank(self) -> int:
        return self._axis("model").rank

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._groups["tensor"]

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._axis("tensor").size

    def get_tensor_model_parallel_rank(self) -> int:
        return self._axis("tensor").rank

    def get_tensor_model_parallel_src_rank(self) -> int:
        axis = self._axis("tensor")
        return axis.ranks[0] if axis.size > 1 else dist.get_rank()

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._groups["pipe"]

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._axis("pipe").size

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._axis("pipe").rank
