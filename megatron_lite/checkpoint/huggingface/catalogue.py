"""Every Hugging Face architecture that we can be, and which of them a model of ours leaves as."""

from __future__ import annotations

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.checkpoint.huggingface.families import Family, obstacles
from megatron_lite.checkpoint.huggingface.gemma import GEMMA, GEMMA2
from megatron_lite.checkpoint.huggingface.gpt2 import GPT2
from megatron_lite.checkpoint.huggingface.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from megatron_lite.checkpoint.huggingface.marian import MARIAN
from megatron_lite.checkpoint.huggingface.t5 import T5
from megatron_lite.model_config import ModelConfig

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GEMMA, GEMMA2, T5, MARIAN)  # of several that could hold a model the first is taken
AUTO = "auto"


def family_for(config: ModelConfig, asked: str = AUTO) -> Family:
    """The architecture that is asked for by its model_type or its own name, or else the first that can hold the model. Raises
    ConfigError naming what stands in the way, of all of them what does in the nearest of its kind, decoder or encoder-decoder."""
    if asked == AUTO:
        faults = {family.model_type: obstacles(family, config) for family in FAMILIES}
        fitting = [family for family in FAMILIES if not faults[family.model_type]]
        if fitting:
            return fitting[0]
        of_its_kind = [family for family in FAMILIES if family.demands.get("family", "decoder") == config.family]
        nearest = min((family.model_type for family in of_its_kind), key=lambda name: len(faults[name]))
        raise ConfigError([*faults[nearest], Fault("--family", AUTO, "a model that one of them can hold", f"the nearest is {nearest}")])
    for family in FAMILIES:
        if asked in (family.model_type, family.architecture):
            stand_in_the_way = obstacles(family, config)
            if stand_in_the_way:
                raise ConfigError(stand_in_the_way)
            return family
    raise ConfigError([Fault("--family", asked, ", ".join([AUTO, *(family.model_type for family in FAMILIES)]))])
