"""Write a tiny model whose layers keep different KV, with random weights: ``make_hybrid_model.py FOLDER KIND``.

Kind ``windows`` is a Gemma 3, of windows and full attention, ``states`` an LFM2, of convolutions and full attention.
Weights are drawn wide enough for greedy outputs to differ from prompt to prompt: wrong KV shows in the output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from make_model import CHAT, POSITIONS, SPECIAL, SPECIAL_IDS, VOCABULARY, tokenizer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Lfm2Config, Lfm2ForCausalLM

HIDDEN, INNER, HEADS, KV_HEADS = 128, 256, 4, 2
WINDOW = 64

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": POSITIONS,
    **SPECIAL_IDS,
}


def windows() -> torch.nn.Module:
    """Return six layers of which every third has full attention and the others a window."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_SIZES,
            num_hidden_layers=6,
            head_dim=HIDDEN // HEADS,
            query_pre_attn_scalar=HIDDEN // HEADS,
            sliding_window=WINDOW,
            layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        )
    )


def states() -> torch.nn.Module:
    """Return four layers, of convolutions that have a state and of full attention in turns."""
    return Lfm2ForCausalLM(
        Lfm2Config(
            **_SIZES,
            num_hidden_layers=4,
            layer_types=["conv", "full_attention"] * 2,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
        )
    )


def draw(model: torch.nn.Module) -> None:
    """Give the model weights of which every layer counts; what scales its activations stays as it is."""
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * 2.0 / parameter.shape[-1] ** 0.5)


def main(folder: Path, kind: str) -> None:
    """Write everything that vLLM loads."""
    model = {"windows": windows, "states": states}[kind]().to(torch.float32)
    draw(model)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": POSITIONS,
        "chat_template": CHAT,
        **SPECIAL,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens, indent=1))
    if kind == "states":
        # vLLM reads names that transformers has given up
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "conv_dim": HIDDEN,
            "conv_dim_out": HIDDEN,
            "block_dim": HIDDEN,
            "block_ff_dim": INNER,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "block_auto_adjust_ff_dim": False,
            "block_norm_eps": 1e-5,
            "num_heads": HEADS,
            "num_kv_heads": KV_HEADS,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
