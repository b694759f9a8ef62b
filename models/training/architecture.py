"""The demo model's shape and its structured initialisation.

From random weights, attention that looks facts up ("induction") did not appear within a million tokens.  So the weights
start with that structure in place, and training only has to tune it:

* the residual stream holds the token itself (first `OWN` dimensions) and one 32-dimensional code for each of the four
  tokens before it;
* layer 0's heads look back exactly 1, 2, 3 and 4 tokens, by their q/k biases against RoPE, and write those codes;
* layers 1 and 3 match one code of the query with another of the keys: "the token two back is the one three back there";
* layers 2 and 4 match the token itself;
* all matching happens on the slowly turning RoPE dimensions, so it does not depend on distance.

Everything else starts small.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN = 192
LAYERS = 6
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
FEED_FORWARD = 384
# Large, so that the 16 slowest dimension pairs turn by less than a radian over 3,000 tokens.
ROPE_THETA = 1e7
MAX_POSITIONS = 4096

OWN = 64
CODE = 32
LOOK_BACK_STRENGTH = 9.5
LOOK_BACK_PAIRS = 12
MATCH_GAIN = 1.7
COPY_GAIN = 0.3
# What every weight outside the structure starts with.  Large random output projections would drown the codes.
NOISE: dict[str, float] = {
    "embed_tokens": 0.01,
    "o_proj": 0.003,
    "down_proj": 0.004,
    "self_attn": 0.01,
    "mlp": 0.04,
}

# (code of the query, code of the key) for the four heads of each matching layer; 0 is the token itself, k the k-th
# before it.  Heads 0-1 and heads 2-3 share keys.
MATCHES: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((2, 3), (1, 3), (3, 4), (2, 4)),
    2: ((0, 0), (1, 0), (0, 1), (1, 1)),
    3: ((2, 3), (1, 3), (0, 1), (1, 1)),
    4: ((0, 0), (2, 0), (0, 2), (2, 2)),
}


def build_config(vocabulary: int, eos: int, bos: int, pad: int) -> LlamaConfig:
    """A stock Llama configuration; exported as Llama because vLLM's Llama honours `head_dim`."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def _code_slice(back: int) -> slice:
    """Where in the residual stream the code of the token `back` places before stands."""
    start = OWN + (back - 1) * CODE
    return slice(start, start + CODE)


@torch.no_grad()
def structured_init(model: LlamaForCausalLM, twins: list[tuple[int, int]], seed: int) -> None:
    """Overwrite `model`'s weights, in place, with the structure described above.

    `twins` are pairs of token ids of one word with and without its leading space; they start as nearly one vector.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            scale = next(scale for part, scale in NOISE.items() if part in name)
            parameter.copy_(normal(*parameter.shape, scale=scale))

    embedding = model.model.embed_tokens.weight
    embedding[:, :OWN] = normal(embedding.shape[0], OWN, scale=0.12)
    embedding[:, OWN:] = normal(embedding.shape[0], HIDDEN - OWN, scale=0.01)
    for spaced, plain in twins:
        embedding[plain] = embedding[spaced] + normal(HIDDEN, scale=0.02)

    # One random projection makes every code, so that codes of different distances can be compared.
    projection = torch.linalg.qr(normal(OWN, OWN, scale=1.0))[0][:CODE]  # (CODE, OWN)
    _init_look_back(model, projection)
    for layer, pairs in MATCHES.items():
        _init_matching(model, layer, pairs, projection)


def _init_look_back(model: LlamaForCausalLM, projection: torch.Tensor) -> None:
    attention = model.model.layers[0].self_attn
    half = HEAD_DIM // 2
    frequency = ROPE_THETA ** (-torch.arange(half).float() / half)
    pairs = torch.arange(half) < LOOK_BACK_PAIRS
    for kv_head in range(KV_HEADS):
        rows = kv_head * HEAD_DIM
        attention.k_proj.bias[rows : rows + half] = LOOK_BACK_STRENGTH * pairs
        attention.v_proj.weight[rows : rows + HEAD_DIM, :OWN] += torch.eye(HEAD_DIM, OWN)
    for head in range(HEADS):
        back = head + 1
        rows = head * HEAD_DIM
        # The score of a key at distance d becomes sum_i cos(f_i * (d - back)), which peaks at d = back.
        attention.q_proj.bias[rows : rows + half] = LOOK_BACK_STRENGTH * torch.cos(back * frequency) * pairs
        attention.q_proj.bias[rows + half : rows + HEAD_DIM] = -LOOK_BACK_STRENGTH * torch.sin(back * frequency) * pairs
        attention.o_proj.weight[_code_slice(back), rows : rows + HEAD_DIM] += 0.1 * projection


def _init_matching(
    model: LlamaForCausalLM, layer: int, pairs: tuple[tuple[int, int], ...], projection: torch.Tensor
) -> None:
    attention = model.model.layers[layer].self_attn
    half = HEAD_DIM // 2
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half // 2, half) + half])  # CODE dimensions

    def reader(back: int) -> torch.Tensor:
        """(CODE, HIDDEN): reads the code of the token `back` places before, or of the token itself."""
        matrix = torch.zeros(CODE, HIDDEN)
        if back == 0:
            matrix[:, :OWN] = projection
        else:
            matrix[:, _code_slice(back)] = torch.eye(CODE)
        return matrix * MATCH_GAIN

    group = HEADS // KV_HEADS
    for kv_head in range(KV_HEADS):
        rows = kv_head * HEAD_DIM
        attention.k_proj.weight[rows + slow] += reader(pairs[kv_head * group][1])
        attention.v_proj.weight[rows : rows + HEAD_DIM, :OWN] += torch.eye(HEAD_DIM, OWN)
    for head in range(HEADS):
        rows = head * HEAD_DIM
        attention.q_proj.weight[rows + slow] += reader(pairs[head][0])
        attention.o_proj.weight[:OWN, rows : rows + HEAD_DIM] += COPY_GAIN / math.sqrt(HEADS) * torch.eye(OWN, HEAD_DIM)


def twin_tokens(vocabulary: dict[str, int]) -> list[tuple[int, int]]:
    """(id of "Ġword", id of "word") for every word that has both."""
    return [
        (index, vocabulary[token[1:]])
        for token, index in vocabulary.items()
        if token.startswith("Ġ") and len(token) > 2 and token[1:] in vocabulary
    ]


def build_model(tokenizer_vocabulary: dict[str, int], eos: int, bos: int, pad: int, seed: int) -> LlamaForCausalLM:
    """A new float32 model with the structured initialisation; `seed` decides every random weight."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(build_config(len(tokenizer_vocabulary), eos, bos, pad))
    structured_init(model, twin_tokens(tokenizer_vocabulary), seed)
    return model
