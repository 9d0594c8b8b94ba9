"""Tiny random checkpoints in Hugging Face format, for tests: seeded, without a tokenizer."""

from __future__ import annotations

from pathlib import Path

FAMILIES = ("llama", "qwen2", "qwen3")


def save_tiny_model(
    directory: Path,
    family: str = "qwen3",
    *,
    tied: bool = False,
    seed: int = 0,
    vocab_size: int = 96,
    hidden_size: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate_size: int = 48,
    max_position_embeddings: int = 256,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    scale: float = 4.0,
    **config: object,
) -> Path:
    """Save a model with random weights in `directory` and return it. `config`: for the transformers
    configuration.

    scale: multiplies every matrix, so that log-probs are far from uniform and errors show; norms
    and biases are random too.
    """
    import torch
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }
    if family == "qwen3_moe":
        config = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            **config,
        }
    make_config, make_model = classes[family]
    settings = make_config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        **({"head_dim": hidden_size // heads} if family.startswith(("qwen3", "gemma")) else {}),
        **config,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model(settings)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(scale)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                else:
                    # Gemma's norms are stored relative to 1.
                    parameter.normal_(0 if family.startswith("gemma") else 1, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    return Path(directory)
