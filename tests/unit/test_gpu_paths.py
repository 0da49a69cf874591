"""If this fails, what runs on GPUs only is called wrongly, or waits for the device in the middle of a step.

Fake tensors have shapes and no values: torch's own checks of arguments run, and whatever reads a value fails.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.distributed import describe_attention
from megatron_lite.config import OptimizerConfig, TrainingConfig
from megatron_lite.layers import gpu_attention
from megatron_lite.layers.document_kernels import KernelChoice
from megatron_lite.model_config import ModelConfig
from megatron_lite.models import decoder
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.random import DropoutKey
from megatron_lite.training.engine_torch import TorchEngine
from megatron_lite.training.step import train_step

CONFIG = ModelConfig(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=300,
    hidden_dropout=0.1,
)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kernel", ["varlen", "blocks"])
def test_forward_and_backward_read_nothing_from_the_device(kernel: str, checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 rows with documents, dropout on: torch's varlen_attn takes our arguments, and no value is asked for."""
    monkeypatch.setattr(decoder, "choose_kernel", lambda *_, **__: KernelChoice(kernel))
    with torch.device("meta"):
        model = decoder.Decoder(CONFIG, ProcessGroups.single(), decoder.ForwardOptions(checkpointing))
    with FakeTensorMode():
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16))
        ids = torch.zeros(4, 300, dtype=torch.int64)
        batch = Batch(ids, ids, ids, ids.to(torch.int32), torch.zeros(4, dtype=torch.int64), torch.zeros(9, dtype=torch.int32), longest=100)
        loss, _ = model(batch, DropoutKey(1, 2))
        loss.backward()
        assert loss.dtype == torch.float32
        for parameter in model.parameters():
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape


def test_a_step_reads_three_numbers_whatever_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets and stop flag, loss, gradient norm; no more with more micro-batches, or the host falls behind the device."""
    reads: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                reads.append("a number")
            return func(*args, **(kwargs or {}))

    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [reads.append("a list"), tolist(tensor)][1])
    training = TrainingConfig(steps=2, engine="torch", sequence_length=32, global_batch_size=3)
    engine = TorchEngine(CONFIG, training, OptimizerConfig(), ProcessGroups.single(), seed=1, device=torch.device("cpu"))
    ids = np.zeros((1, 32), dtype=np.int64)
    batches = [Batch.from_rows(ids, ids, [[0]], [number], document_mask=False) for number in range(3)]
    train_step(engine, batches, step=1, lr=1e-3, seed=1)
    reads.clear()
    with Counted():
        train_step(engine, batches, step=2, lr=1e-3, seed=1)
    assert reads == ["a list", "a number", "a number"]


def test_a_run_says_what_computes_attention() -> None:
    """A fallback is printed with its reason."""
    training = TrainingConfig(steps=1, document_kernel="flex")

    def said(document_mask: bool, **model: float) -> str:
        return describe_attention(CONFIG.model_copy(update=model), training, document_mask=document_mask, device=torch.device("cpu"))

    assert said(False) == "attention by SDPA"
    assert said(True) == "attention by SDPA, in rows of several documents by pieces (on CPU flex has no backward)"
    assert said(True, attention_dropout=0.1).startswith("attention by its formula in fp32 (attention_dropout")


@torch.library.custom_op("megatron_lite_tests::opaque", mutates_args=())
def opaque(q: torch.Tensor, begins: torch.Tensor, longest: int) -> torch.Tensor:
    """In the place of torch's varlen_attn: an operator that compilers leave whole, as that is."""
    return q.clone()


opaque.register_fake(lambda q, begins, longest: torch.empty_like(q))
opaque.register_autograd(lambda _, gradient: (gradient, None, None))


@pytest.mark.filterwarnings("ignore:.*non-leaf Tensor:UserWarning", "ignore::UserWarning:torch")  # the compiler's own
@pytest.mark.parametrize("kernel", ["pieces", "varlen"])
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # at 8 programs
def test_compiled_layers_meet_other_documents_without_being_compiled_anew(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of documents that compiled code took for constants would use up torch's 8 programs, and the rest runs uncompiled."""
    monkeypatch.setattr(decoder, "choose_kernel", lambda *_, **__: KernelChoice(kernel))
    monkeypatch.setattr(gpu_attention, "varlen_attn", lambda q, k, v, begins, ends, max_q, max_k, **_: opaque(q, begins, max_q))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build_model(CONFIG, ProcessGroups.single(), seed=1)
    for layer in model.layers:
        layer.compile(backend="eager")
    for seed in range(12):
        random = np.random.default_rng(seed)
        starts = [[0, *np.sort(random.choice(np.arange(1, 60), random.integers(1, 20), replace=False))] for _ in range(2)]
        ids = random.integers(0, 1000, (2, 60))
        model(Batch.from_rows(ids, ids, starts, [0, 1], document_mask=True))[0].backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
