"""If these fail, a model that leaves as one of transformers' architectures, or comes from one, computes something else there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.errors import CheckpointError, ConfigError
from launcher.huggingface import changed_meaning_of_folder
from megatron_lite.checkpoint.huggingface.catalogue import FAMILIES, family_for
from megatron_lite.checkpoint.huggingface.families import REQUIRED, Family, differences, from_tree, to_tree, values_of
from megatron_lite.checkpoint.huggingface.folder import SINGLE, check_tensors, open_tensors, read_model
from megatron_lite.checkpoint.huggingface.load import load_huggingface
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, Source
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import Decoder
from megatron_lite.parallel.groups import ProcessGroups
from tests.huggingface_cases import ARCHITECTURES, architecture, checkpoint, export, trained, write_config

IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
LENGTH = 32


def tokens(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def our_logits(model: torch.nn.Module, ids: torch.Tensor, sources: list[list[int]] | None) -> torch.Tensor:
    assert isinstance(model, Decoder)
    segments = None if sources is None else torch.zeros_like(ids, dtype=torch.int32)
    source = None if sources is None else Source.of(sources)
    with torch.no_grad():
        return model.logits(Batch(ids, ids, torch.arange(LENGTH).expand_as(ids), segments, torch.arange(len(ids)), source=source))


def their_logits(model: Any, ids: torch.Tensor, sources: list[list[int]] | None) -> torch.Tensor:
    with torch.no_grad():
        if sources is None:
            return torch.as_tensor(model(ids).logits)
        longest = max(map(len, sources))
        padded = torch.tensor([[*source, *[1] * (longest - len(source))] for source in sources])
        mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
        return torch.as_tensor(model(input_ids=padded, attention_mask=mask, decoder_input_ids=ids).logits)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_leave_and_come_back(name: str, tmp_path: Path) -> None:
    """transformers' logits with an exported folder are the model's to 1e-4 in fp32, all of its weights used; read again, the model
    section is the same and every weight equal to the bit; what transformers then saves by itself, in its own layout, too."""
    import transformers

    model_type, _ = ARCHITECTURES[name]
    config = architecture(name)
    model = trained(config, noise=0.05)
    saved = checkpoint(tmp_path / "saved", model)
    folder = export(saved, tmp_path / "out", max_file_bytes=60_000, decoder_start_token_id=1, **IDS)
    family, back = read_model(folder)
    assert family.model_type == model_type and differences(family, config, back, where="x") == []
    theirs, report = getattr(transformers, family.architecture).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    learnt = sum(each.numel() for key, each in theirs.named_parameters() if "embed_positions" not in key)  # Marian's are sines
    assert learnt == sum(each.numel() for each in model.parameters())
    sources = [tokens(1, 21, 3)[0].tolist(), tokens(1, 13, 4)[0].tolist()] if config.family == "seq2seq" else None
    ids = tokens(2, LENGTH, 1)
    worst = (their_logits(theirs.eval(), ids, sources) - our_logits(model, ids, sources)).abs().max()
    assert worst < 1e-4, worst
    theirs.save_pretrained(tmp_path / "again")
    for written in (folder, tmp_path / "again"):
        back = read_model(written)[1]
        assert differences(family, config, back, where="x") == [], written
        fresh = build_model(back, ProcessGroups.single(), seed=9)
        load_huggingface(written, model_slices(fresh), ProcessGroups.single())
        wanted = dict(model.named_parameters())
        assert all(torch.equal(value, wanted[key]) for key, value in fresh.named_parameters()), written


@pytest.mark.parametrize("scaled", [True, False])
def test_t5s_head_is_what_the_files_hold(scaled: bool, tmp_path: Path) -> None:
    """transformers 5 saves every T5 as tied, also one with a head of its own, whose logits are scaled or not: ours are the same. On
    the hub the head that is not scaled is said to be untied. A tied head goes with either scale, too."""
    from transformers import T5Config, T5ForConditionalGeneration

    said = {"architectures": None, "scale_decoder_outputs": scaled}
    config = architecture("t5-1.1", logit_scale=64**-0.5 if scaled else 1.0, tie_word_embeddings=True)
    theirs = T5ForConditionalGeneration(T5Config(**{**to_tree(family_for(config), config), **said, **IDS}, decoder_start_token_id=1))
    ids, sources = tokens(2, LENGTH, 1), [tokens(1, 21, 3)[0].tolist()] * 2
    for tied in (True, False):
        if not tied:
            theirs.lm_head.weight = torch.nn.Parameter(torch.randn(97, 64, generator=torch.Generator().manual_seed(5)))
        theirs.save_pretrained(tmp_path)
        tree = json.loads((tmp_path / "config.json").read_text())
        assert (tree["tie_word_embeddings"], tree["scale_decoder_outputs"]) == (True, scaled)
        family, ours = read_model(tmp_path)
        assert differences(family, config.model_copy(update={"tie_word_embeddings": tied}), ours, where="x") == []
        assert from_tree(FAMILIES, to_tree(family, ours), where="x")[1] == ours
        model = build_model(ours, ProcessGroups.single(), seed=9)
        load_huggingface(tmp_path, model_slices(model), ProcessGroups.single())
        worst = (their_logits(theirs.eval(), ids, sources) - our_logits(model, ids, sources)).abs().max()
        assert worst < 1e-4, worst
    if not scaled:
        del tree["scale_decoder_outputs"]
        write_config(tmp_path, {**tree, "tie_word_embeddings": False})
        assert read_model(tmp_path)[1] == ours


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_section_comes_back(name: str) -> None:
    """config.json says everything of the model section but what is for training only."""
    config = architecture(name)
    family = family_for(config)
    found, back = from_tree(FAMILIES, json.loads(json.dumps(to_tree(family, config))), where="x")
    assert found is family
    left = {key for key, value in values_of(config).items() if values_of(back)[key] != value}
    assert {key for key in left if not key.startswith("init.")} == set()


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("llama3", "llama", {"attention": {"qkv_bias": True}}, "model.attention.o_bias: got False"),
    ("llama3", "llama", {"rope": {"partial_rotary_factor": 0.5}}, "model.rope.partial_rotary_factor: got 0.5"),
    ("llama3", "llama", {"rope": {"scaling": {"type": "ntk", "factor": 2.0}}}, "rope.theta=20945.88"),
    ("llama3", "llama", {"attention": {"sinks": True}, "norm": {"type": "layer_norm"}}, "model.attention.sinks: got True"),
    ("mistral", "mistral", {"attention": {"sliding_window": 8, "global_every": 2}}, "model.attention.global_every: got 2"),
    ("qwen3", "qwen3", {"attention": {"qk_norm": "layer_norm"}}, "model.attention.qk_norm: got 'layer_norm'"),
    ("gpt2", "gpt2", {"num_key_value_heads": 2}, "model.num_key_value_heads: got 2, wanted 4"),
    ("gpt2", "gpt2", {"head_dim": 32}, "model.head_dim: got 32, wanted 16"),
    ("gpt2", "GPT2LMHeadModel", {"norm": {"type": "layer_norm"}}, "model.norm.bias: got False, wanted True"),
    ("gpt2", "llama", {}, "model.position.type: got 'learned'"),
    ("gemma", "gemma", {"mlp": {"activation": "gelu"}}, "model.mlp.activation: got 'gelu'"),
    ("gemma2", "gemma2", {"attention": {"scale": 0.3}}, "model.attention.scale: got 0.3"),
    ("gemma2", "gemma2", {"embedding_multiplier": 8.0}, "model.embedding_multiplier: got 8.0, wanted 'sqrt_hidden_size'"),
    ("t5", "t5", {"logit_scale": 0.5}, "model.logit_scale: got 0.5, wanted 0.125, which is hidden_size^-0.5, or 1.0"),
    ("t5-1.1", "t5", {"mlp": {"activation": "gelu"}}, "model.mlp.activation: got 'gelu'"),
    ("marian", "marian", {"encoder": {"share_embedding": False}}, "model.encoder.share_embedding: got False"),
    (
        "marian",
        "auto",
        {"attention": {"o_bias": True}},
        "wanted a model that one of them can hold. the nearest is marian",
    ),
    ("llama-linear-gelu", "auto", {"family": "seq2seq"}, "wanted a model that one of them can hold. the nearest is t5"),
    ("llama3", "bert", {}, "--family: got 'bert', wanted auto, llama, mistral"),
]


@pytest.mark.parametrize(("name", "asked", "changes", "said"), REFUSED)
def test_what_a_target_cannot_be_is_refused_by_name(name: str, asked: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        family_for(architecture(name, **changes), asked)
    assert said in str(refused.value)


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"resid_pdrop": 0.1}, "resid_pdrop and embd_pdrop"),
    ("gpt2", {"activation_function": "mish"}, "activation_function"),
    ("qwen3-window", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, "layer_types"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj"),
    ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings"),
    ("marian", {"decoder_ffn_dim": 5}, "encoder_ffn_dim and decoder_ffn_dim"),
]


@pytest.mark.parametrize(("name", "changes", "named"), UNKNOWN)
def test_a_config_that_we_cannot_be_is_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    config = architecture(name)
    with pytest.raises(ConfigError) as refused:
        from_tree(FAMILIES, {**to_tree(family_for(config), config), **changes}, where="DIR/config.json")
    assert named in str(refused.value)


def test_a_config_that_says_little_is_what_transformers_takes_it_for() -> None:
    """GPT-2's own config.json has neither n_inner nor tie_word_embeddings; Gemma 1's "gelu" is the tanh's, Gemma 2's is not, whose
    null for a cap is no cap; T5's head is tied."""
    gpt2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4}
    found = from_tree(FAMILIES, gpt2, where="x")[1]
    assert (found.intermediate_size, found.tie_word_embeddings, found.mlp.activation) == (256, True, "gelu_pytorch_tanh")
    gemma = to_tree(family_for(architecture("gemma")), architecture("gemma"))
    found = from_tree(FAMILIES, {**gemma, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, where="x")[1]
    assert found.mlp.activation == "gelu_pytorch_tanh"
    gemma = to_tree(family_for(architecture("gemma2")), architecture("gemma2")) | {"hidden_activation": "gelu"}
    silent = ("layer_types", "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping")
    gemma = {key: value for key, value in gemma.items() if key not in silent}
    found = from_tree(FAMILIES, gemma, where="x")[1]
    assert (found.attention.sliding_window, found.attention.global_every, found.attention.scale) == (4096, 2, 256**-0.5)
    assert (found.mlp.activation, found.attention.logit_softcapping, found.final_logit_softcapping) == ("gelu", 50.0, 30.0)
    uncapped = architecture("gemma2", attention={**ARCHITECTURES["gemma2"][1]["attention"], "logit_softcapping": None})
    uncapped = uncapped.model_copy(update={"final_logit_softcapping": None})
    found = from_tree(FAMILIES, to_tree(family_for(uncapped), uncapped), where="x")[1]
    assert (found.attention.logit_softcapping, found.final_logit_softcapping) == (None, None)
    mistral = to_tree(family_for(architecture("mistral")), architecture("mistral")) | {"num_key_value_heads": None}
    assert from_tree(FAMILIES, mistral, where="x")[1].kv_heads == 4  # as many as query heads, where silence is 8
    t5 = {"model_type": "t5", "vocab_size": 97, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    found = from_tree(FAMILIES, t5, where="x")[1]
    assert (found.tie_word_embeddings, found.logit_scale, found.head_size, found.encoder_layers) == (True, 0.125, 64, 2)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_silence_is_their_default(family: Family) -> None:
    """What a config.json without optional keys is taken for is what transformers makes of it, KV heads among it."""
    from transformers import AutoConfig

    sizes = {"vocab_size": 97, "hidden_size": 2048, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 32, "encoder.num_hidden_layers": 2}
    said = {theirs: sizes[key.ours] for key in family.keys if key.default is REQUIRED for theirs in key.theirs}
    full = AutoConfig.for_model(family.model_type, **said).to_dict()
    tree = {"model_type": family.model_type, **said}
    (_, silent), (_, spoken) = from_tree(FAMILIES, tree, where="x"), from_tree(FAMILIES, {**full, "architectures": None}, where="x")
    assert differences(family, silent, spoken, where="x") == []


def test_a_run_of_another_function_is_refused() -> None:
    """Also by a key that the folder's architecture has no word for: shapes alone don't tell a LayerNorm from an RMSNorm."""
    config = architecture("llama3")
    faults = differences(family_for(config), architecture("llama3", norm={"type": "layer_norm"}), config, where="x")
    assert [fault.field for fault in faults] == ["model.norm.type"]


def test_a_context_and_an_eps_may_be_others(tmp_path: Path) -> None:
    """On record; what would read the weights as something else, or needs other tensors, heads or tokens, stays refused."""
    config = architecture("mistral")
    write_config(tmp_path, to_tree(family_for(config), config))

    def recorded(**changes: Any) -> list[tuple[str, Any, Any]]:
        return changed_meaning_of_folder(tmp_path, architecture("mistral", **changes))

    assert recorded(attention={"sliding_window": 16, "scale": 0.5}, rms_norm_eps=1e-3, residual={"parallel": "two_norms"}) == [
        ("model.rms_norm_eps", 1e-5, 1e-3),
        ("model.attention.sliding_window", 8, 16),
    ]
    longer: dict[str, Any] = {"theta": 9e5, "scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}
    assert [key for key, _, _ in recorded(rope=longer)] == ["model.rope.theta", *(f"model.rope.scaling.{key}" for key in longer["scaling"])]
    assert recorded(norm={"zero_centred": True}, mlp={"activation": "relu"}, embedding_multiplier=2.0) == []
    attention = {"sliding_window": 8, "qkv_bias": True, "qk_norm": "rms_norm", "sinks": True, "scale": "temperature"}
    assert recorded(attention=attention, num_key_value_heads=1, vocab_size=98, head_dim=8) == []
    assert recorded(norm={"placement": "sandwich"}, mlp={"gated": False, "bias": True}, position={"type": "learned"}) == []


def test_files_as_they_are_on_the_hub(tmp_path: Path) -> None:
    """openai-community/gpt2 names tensors without `transformer.` and keeps its causal mask; Marian's logits may have a bias."""
    config = architecture("gpt2")
    model = trained(config)
    folder = export(checkpoint(tmp_path / "gpt2", model), tmp_path / "out")
    weights = {name.removeprefix("transformer."): value for name, value in load_file(folder / SINGLE).items()}
    save_file({**weights, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, folder / SINGLE)
    fresh = build_model(config, ProcessGroups.single(), seed=9)
    load_huggingface(folder, model_slices(fresh), ProcessGroups.single())
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters()))
    folder = export(checkpoint(tmp_path / "marian", trained(architecture("marian"))), tmp_path / "mt")
    weights = load_file(folder / SINGLE)
    for value, refused in ((0.0, False), (0.1, True)):
        save_file({**weights, "final_logits_bias": torch.full((1, 97), value)}, folder / SINGLE)
        if refused:
            with pytest.raises(CheckpointError, match="not all zero, which this program has nothing for: final_logits_bias"):
                check_tensors(folder, open_tensors(folder), *read_model(folder))
        else:
            check_tensors(folder, open_tensors(folder), *read_model(folder))
    save_file({**weights, "lm_head.weight": weights["model.shared.weight"] * 2}, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is no copy of model\.shared\.weight: this program has one for both"):
        check_tensors(folder, open_tensors(folder), *read_model(folder))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tables_name_the_tensors_of_the_model(name: str, tmp_path: Path) -> None:
    """The logical names and shapes are those that a checkpoint of the model has, no more and no fewer."""
    config = architecture(name)
    wanted = {key: entry.shape for key, entry in read_manifest(checkpoint(tmp_path, trained(config))).tensors.items()}
    assert {ours: place.shape for ours, place in family_for(config).places(config).items()} == wanted


def test_the_smallest_model_of_ours_is_a_llama() -> None:
    assert family_for(ModelConfig(vocab_size=97)).model_type == "llama"
