"""If this fails, what runs on GPUs only is called wrongly, or waits for the device in the middle of a step.

Fake tensors have shapes and no values: torch's own checks of arguments run, and whatever reads a value fails.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.distributed import describe_attention
from megatron_lite.config import ModelConfig, TrainingConfig
from megatron_lite.layers.document_kernels import KernelChoice
from megatron_lite.models import decoder
from megatron_lite.models.batch import Batch
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.random import DropoutKey

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
        model = decoder.Decoder(CONFIG, ProcessGroups.single(), checkpointing=checkpointing)
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


def test_a_run_says_what_computes_attention() -> None:
    """A fallback is printed with its reason."""
    training = TrainingConfig(steps=1, document_kernel="flex")

    def said(document_mask: bool, **model: float) -> str:
        return describe_attention(CONFIG.model_copy(update=model), training, document_mask=document_mask, device=torch.device("cpu"))

    assert said(False) == "attention by SDPA"
    assert said(True) == "attention by SDPA, in rows of several documents by pieces (on CPU flex has no backward)"
    assert said(True, attention_dropout=0.1).startswith("attention by its formula in fp32 (attention_dropout")
