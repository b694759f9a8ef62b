"""Models with real shapes and random weights, made on this machine: what benchmarks and experiments serve.

    python -m load_tests.harness.models 365m     # makes it where it is not there yet, prints its folder

Prefill, decode and the weight of KV depend on a model's shape, not on what it has learnt. The form is Qwen2's. What a
benchmark needs of the rest is made for it:

- The tokenizer is a byte-level BPE trained on the Python language reference that the standard library carries
  (`pydoc_data.topics`): the same in every checkout, for one version of Python.
- The chat template is append-only: a conversation's rendering begins with the rendering of every earlier part of it.
- Only whole words with a space before them have embeddings long enough to win the greedy choice. An answer is therefore
  text that is cut into the same tokens when it comes back in the next prompt, so the KV of *answers* can be reused, as
  it can be with a trained model; and an answer never ends before its ``max_tokens``.
- Biases of queries and keys are drawn wider than the weights' products, because keys of trained models have channels
  with means of their own, which is what compression lives on. Those of values are zero: else every prompt would get the
  same answer, and wrong KV would go unnoticed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.model_folder import PROJECT_ROOT
from load_tests.measuring.program import one_sentence, out

MODELS_ROOT = PROJECT_ROOT / ".crosskv" / "models"
MAX_POSITIONS = 32_768
VOCABULARY = 8_192
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
_SPACED_WORD = re.compile("Ġ[A-Za-z]+")
"""As byte-level BPE writes a word with a space before it. Such tokens in a row are cut apart at the spaces again."""
_SELDOM_CHOSEN = 0.25
"""Length of the other tokens' embeddings, as a part of the usual one."""


class ModelError(Exception):
    """A model that cannot be had. One sentence."""


@dataclass(frozen=True)
class Shape:
    """A Qwen2 with embeddings that are also the output layer."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = VOCABULARY

    @property
    def parameters(self) -> int:
        """All of them, the embeddings once."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = 2 * self.hidden_size * queries + queries + 2 * (self.hidden_size + 1) * keys
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_hidden_layers * layer + (self.vocab_size + 1) * self.hidden_size

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype_bytes


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("10m", 8, 256, 4, 2, 64, 1_024),
        Shape("40m", 12, 512, 8, 2, 64, 1_536),
        # Qwen2.5-0.5B with a vocabulary of 8,192 in place of its 151,936.
        Shape("365m", 24, 896, 14, 2, 64, 4_864),
    )
}


def model_folder(name: str, root: Path = MODELS_ROOT) -> Path:
    """Return the folder of one of `SHAPES` in Hugging Face's format, bf16; make it when it is not there.

    A folder is there whole or not at all, also when several processes make it at once. Equal names give equal files.

    Raises:
        ModelError: the name is unknown, or the folder cannot be written.
    """
    if name not in SHAPES:
        raise ModelError(f"there is no model {name!r}; choose one of {', '.join(SHAPES)}.")
    folder = (root / name).resolve()
    if not (folder / "config.json").is_file():
        try:
            _make(SHAPES[name], folder)
        except OSError as error:
            raise ModelError(
                f"the model {name} cannot be written to {folder} ({error.strerror or error}); "
                "make room there, or choose another folder."
            ) from None
    return folder


def write_hybrid(kind: str, folder: Path) -> None:
    """Write a model of some 40M parameters whose layers do not all attend to everything, bf16, random weights.

    `windows`: in ten of twelve layers, 512 tokens, as Gemma 3; `states`: six layers of Mamba 2, two of full attention,
    as Nemotron-H. Raises OSError.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, NemotronHConfig, NemotronHForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    model: Any
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "windows":
            layers = (["sliding_attention"] * 5 + ["full_attention"]) * 2
            shape |= {"num_hidden_layers": 12, "layer_types": layers, "sliding_window": 512}
            model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, query_pre_attn_scalar=64))
        else:
            layers = ["mamba", "mlp", "mamba", "mlp", "mamba", "mlp", "attention", "mlp"] * 2
            shape |= {"mamba_num_heads": 12, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 32}
            model = NemotronHForCausalLM(
                NemotronHConfig(**shape, conv_kernel=4, chunk_size=128, layers_block_type=layers)
            )
    model.to(torch.bfloat16).save_pretrained(folder)
    train_tokenizer(VOCABULARY).save_pretrained(folder, save_jinja_files=False)


def token_counter(folder: Path) -> Callable[[str], int]:
    """Count a text's tokens with the tokenizer of a model's folder, special tokens of a prompt's beginning left out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _make(shape: Shape, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{shape.name}-") as scratch:
        out.print(f"making the model {shape.name}")
        made = Path(scratch) / shape.name
        tokenizer = train_tokenizer(shape.vocab_size)
        tokenizer.save_pretrained(made, save_jinja_files=False)
        _random_model(shape, tokenizer).save_pretrained(made)
        try:
            made.rename(folder)
        except OSError:
            # Another process was quicker; the files are the same.
            if not (folder / "config.json").is_file():
                raise


def train_tokenizer(vocabulary: int) -> Any:
    """The byte-level BPE of these models, with the template above; a second."""
    from pydoc_data.topics import topics

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, START, END)],
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def _random_model(shape: Shape, tokenizer: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(_config(shape, tokenizer), dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                parameter.normal_()
        others = [index for token, index in tokenizer.get_vocab().items() if not _SPACED_WORD.fullmatch(token)]
        model.get_input_embeddings().weight[others] *= _SELDOM_CHOSEN
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _config(shape: Shape, tokenizer: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    root: Annotated[Path, typer.Option(help="The folder in which the model's folder is made.")] = MODELS_ROOT,
) -> None:
    """Make a model with random weights, where it is not there yet, and print its folder."""
    with one_sentence(ModelError):
        print(model_folder(name, root))


if __name__ == "__main__":
    typer.run(main)
