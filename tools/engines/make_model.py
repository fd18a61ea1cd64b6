"""Write a tiny Llama with fixed random weights, and a tokenizer: ``make_model.py FOLDER [SEED]``.

The weights are scaled so that greedy outputs differ from prompt to prompt: wrong KV shows in the output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCABULARY, POSITIONS = 4, 256, 4, 2, 4096, 8192
INNER = 3 * HIDDEN
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def tokenizer() -> Tokenizer:
    """Train a byte-level BPE on made-up words: any text encodes, and always to the same tokens."""
    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = [" ".join(f"w{(i * 7919 + j * 104729) % 9973}" for j in range(40)) for i in range(400)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(words, trainer)
    return made


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Draw the weights; attention is sharp enough for every token of the prompt to count."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    head = HIDDEN // HEADS
    drawn = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 2.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        drawn |= {
            prefix + "self_attn.q_proj.weight": matrix(HEADS * head, HIDDEN, 2.0),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * head, HIDDEN, 2.0),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * head, HIDDEN, 2.0),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head, 2.0),
            prefix + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return drawn


def main(folder: Path, seed: int = 1234) -> None:
    """Write everything that engines load; other seeds are other weights of the same model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **SPECIAL_IDS,
    }
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": POSITIONS,
        "chat_template": CHAT,
        **SPECIAL,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config", config),
        ("tokenizer_config", tokens),
        ("generation_config", SPECIAL_IDS),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    save_file(weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
