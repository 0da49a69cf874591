"""Sizes of a model as pure functions of its config."""

from __future__ import annotations

from megatron_lite.attention_sizes import cut_extras, keys_seen, replicated_extras
from megatron_lite.model_config import ModelConfig

LEAST_TILE_SCORES = 1 << 17  # a smaller tile of CPU attention costs more in calls than it saves


def num_parameters(config: ModelConfig) -> int:
    """Elements of all logical tensors; a tied head counts once, padding not at all."""
    embeddings = num_vocabulary_matrices(config) - 1  # the head is counted with the matrices
    vectors = num_cut_vectors(config) + num_replicated_parameters(config)
    return num_matrix_parameters(config) + vectors + embeddings * config.vocabulary * config.hidden_size


def num_vocabulary_matrices(config: ModelConfig) -> int:
    """Matrices with a row for each token: one embedding, or one for each side; and the head, where it is not the embedding."""
    return 1 + (not config.tie_word_embeddings) + (config.family == "seq2seq" and not config.encoder.share_embedding)


def num_matrix_parameters(config: ModelConfig) -> int:
    """Elements of the matrices that each token is multiplied with: the head is one, tied or not; the embedding is a look-up."""
    layers = config.num_hidden_layers * layer_matrix_parameters(config, cross=config.family == "seq2seq")
    return layers + config.encoder_layers * layer_matrix_parameters(config) + config.vocabulary * config.hidden_size


def layer_matrix_parameters(config: ModelConfig, *, cross: bool = False) -> int:
    """Elements of one layer's matrices, those of cross-attention with them."""
    size, head, heads, kv = config.hidden_size, config.head_size, config.num_attention_heads, config.kv_heads
    attention = size * (heads + 2 * kv) * head + heads * head * size
    return attention * (2 if cross else 1) + (3 if config.mlp.gated else 2) * size * config.intermediate_size


def num_cut_vectors(config: ModelConfig) -> int:
    """Elements of vectors that are cut over tp: the biases of what is cut by its rows, and what each head has of its own."""
    feed_forward = (2 if config.mlp.gated else 1) * config.intermediate_size if config.mlp.bias else 0
    return (config.num_hidden_layers + config.encoder_layers) * feed_forward + cut_extras(config)


def num_replicated_parameters(config: ModelConfig) -> int:
    """Elements that every tp rank holds: norms, biases of what is cut by its columns, learned step sizes and positions, norms of heads."""
    size, decoder, encoder = config.hidden_size, config.num_hidden_layers, config.encoder_layers
    branches = (3 if encoder else 2) * decoder + 2 * encoder
    inputs = branches - (decoder if config.residual.parallel == "one_norm" else 0)
    norms = inputs + (branches if config.norm.placement == "sandwich" else 0)
    if config.has_final_norm:
        norms += 2 if encoder else 1
    biases = (decoder + encoder) * size if config.mlp.bias else 0
    steps = {"none": 0, "layer": decoder + encoder, "branch": branches}[config.residual.learned_step_size]
    return norms * size * (2 if config.norm.bias else 1) + biases + steps + replicated_extras(config)


def vocabulary_rows(vocabulary: int, tp: int) -> int:
    """Rows of the embedding and the head on one rank, padding included."""
    return -(-vocabulary // tp)


def num_local_parameters(config: ModelConfig, tp: int) -> int:
    """Elements that each tp rank holds of a model cut over tp, the vocabulary's padding included."""
    size = config.hidden_size
    vocabularies = num_vocabulary_matrices(config) * vocabulary_rows(config.vocabulary, tp) * size
    cut = num_matrix_parameters(config) - config.vocabulary * size + num_cut_vectors(config)
    assert cut % tp == 0, (cut, tp)
    return cut // tp + num_replicated_parameters(config) + vocabularies


def largest_local_parameter(config: ModelConfig, tp: int) -> int:
    """Elements of the largest parameter of a rank."""
    size, heads = config.hidden_size, config.num_attention_heads + 2 * config.kv_heads
    return max(
        vocabulary_rows(config.vocabulary, tp) * size,
        (2 if config.mlp.gated else 1) * config.intermediate_size // tp * size,
        heads * config.head_size // tp * size,
        config.max_position_embeddings * size if config.position.type == "learned" else 0,
    )


def loss_chunk_tokens(rows: int, *, on_cpu: bool) -> int:
    """Tokens whose logits stand at once in the loss, over this rank's rows of the vocabulary: 32 MiB of fp32 on CPU, near its
    caches; 512 MiB on GPUs, where each chunk costs a pass over the head's fp32 gradient."""
    return max((1 << 23 if on_cpu else 1 << 27) // max(rows, 1), 64)


def tile_height(sharing: int) -> int:
    """Queries in a tile of CPU attention, with so many heads to a key head; with 512 keys its scores are 786 kB."""
    return max(384 // sharing // 32 * 32, 32)


def tile_scores(sharing: int, length: int) -> int:
    """Scores of the largest tile in a row of this length."""
    return sharing * min(tile_height(sharing), length) * length


def checkpoint_bytes(config: ModelConfig) -> int:
    """Bytes of tensors in a checkpoint: the fp32 master and Adam's two moments of every logical parameter, on any layout."""
    return 12 * num_parameters(config)


def flops_per_token(config: ModelConfig, sequence_length: int, source_length: int | None = None) -> float:
    """FLOPs of forward and backward for a token: 6 * N_matrix + 12 * layers * H * E * S (Chowdhery et al. 2022, appendix B).

    A multiply-add is 2; the attention term counts all S keys for each query, causal or not and whatever the documents, or
    those of a sliding window; recomputed activations don't count. This is the numerator of model FLOPs utilisation (MFU). Of an encoder-decoder: for a target,
    with its share of the source's work, whose rows have `source_length` tokens (none given: as many as targets); the keys and values of
    cross-attention are made of source tokens.
    """
    layers, width = config.num_hidden_layers, config.num_attention_heads * config.head_size
    if config.family != "seq2seq":
        return float(6 * num_matrix_parameters(config) + 12 * width * keys_seen(config, sequence_length))
    source = sequence_length if source_length is None else source_length
    cross_keys_values = 2 * layers * config.hidden_size * config.kv_heads * config.head_size
    of_source = config.encoder_layers * layer_matrix_parameters(config) + cross_keys_values
    of_target = num_matrix_parameters(config) - of_source
    attention = 12 * width * (layers * (sequence_length + source) + config.encoder_layers * source * source / sequence_length)
    return float(6 * (of_target + of_source * source / sequence_length) + attention)
